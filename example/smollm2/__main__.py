"""`python -m example.smollm2 [--budget full] [--stage NAME …]`: see example/smollm2/README.md."""

from __future__ import annotations

import argparse
import logging
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from example.smollm2 import evaluation, training
from example.smollm2.recipe import Recipe, Stage, play
from example.smollm2.settings import BUDGETS, Settings, settings_of
from search_r1.search.errors import SearchError
from verl.errors import ConfigError, SearchR1Error, explain
from verl.training.devices import device_type

STAGES: dict[str, Stage] = {
    "data": training.prepare_data,
    "dialogues": training.write_dialogues,
    "sft": training.fine_tune,
    "rl": training.reinforce,
    "adapters": training.write_adapters,
    "evaluate": evaluation.measure,
    "ship": evaluation.ship,
}
UNASKED = [name for name in STAGES if name != "ship"]
"""What runs when no stage is named: shipping changes the repository."""


def parser() -> argparse.ArgumentParser:
    """The options; all others are in settings.py, and `--set` changes any of them."""
    result = argparse.ArgumentParser(prog="python -m example.smollm2", description=__doc__)
    add = result.add_argument
    add("--budget", default="short", choices=sorted({budget for budget, _ in BUDGETS}))
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--data-dir", type=Path, help="folder of corpus.jsonl, train.jsonl and dev.jsonl")
    add("--out", type=Path, help="folder to write to")
    add("--seed", type=int)
    add("--stage", nargs="+", choices=list(STAGES), default=UNASKED, metavar="NAME",
        help=f"only these, of {', '.join(STAGES)}; default: all but ship")  # fmt: skip
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other settings")
    return result


def read_settings(given: argparse.Namespace) -> Settings:
    """The settings that a command line asks for. Raises ConfigError."""
    named = {name: getattr(given, name) for name in ("data_dir", "out", "seed")}
    others: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    settings = settings_of(given.budget, device_type(given.device), **others)
    form = OmegaConf.structured(settings)
    OmegaConf.set_readonly(form, False)
    try:
        changed = OmegaConf.to_object(OmegaConf.merge(form, OmegaConf.from_dotlist(given.set)))
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        fix = "see the names in example/smollm2/settings.py"
        raise ConfigError(explain("--set", reason, "KEY=VALUE of a setting", fix)) from error
    assert isinstance(changed, Settings)
    return changed


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; a user's mistake ends in one message and status 2."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    given = parser().parse_args(argv)
    stages = [name for name in STAGES if name in given.stage]
    try:
        play(Recipe(read_settings(given)), STAGES, stages)
    except (SearchR1Error, SearchError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except subprocess.CalledProcessError as error:
        words = " ".join(map(str, error.cmd[:4]))
        sys.stderr.write(f"stopped: `{words} …` failed, see above; the same command goes on\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
