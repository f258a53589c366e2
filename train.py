"""`python train.py key=value …`: `search-r1 train` from a checkout.

Flags of other projects' scripts (`--model NAME`) are answered with the recipe's command.
"""

import itertools
import shlex
import sys

FLAGS = {"model": "BASE_MODEL", "data": "DATA_DIR", "output_dir": "OUTPUT_DIR", "seed": "SEED"}
"""Flags that such scripts have, and the recipe's variables."""

OURS = ("--help", "--cfg", "--config", "--info")
"""Beginnings of flags that training has."""


def recipe(words: list[str]) -> str:
    """Return the command of the recipe with the values of the known flags."""
    pairs = [part for word in words for part in word.split("=", 1)]
    given = dict(itertools.pairwise(pairs))
    found = {variable: given.get(f"--{flag}") for flag, variable in FLAGS.items()}
    values = [f"{name}={shlex.quote(value)} " for name, value in found.items() if value]
    return "".join(values) + "bash train_grpo.sh"


if __name__ == "__main__":
    flags = [word for word in sys.argv[1:] if word.startswith("--")]
    if not sys.argv[1:] or (flags and not flags[0].startswith(OURS)):
        got = flags[0] if flags else "no options"
        fix = f"{recipe(sys.argv[1:])} (or train_ppo.sh; docs/start/migration.md)"
        sys.exit(f"train.py: got {got}, expected options key=value; fix: {fix}")
    from search_r1.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
