"""`python3 -m verl.trainer.main_ppo_format`: `main_ppo` with the format reward as its default."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl.trainer import main_ppo

DEFAULTS = ("reward_model.name=em_format",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `main_ppo`; a `reward_model.name=…` among the arguments takes precedence."""
    arguments = sys.argv[1:] if argv is None else argv
    return main_ppo.main([*DEFAULTS, *arguments])


if __name__ == "__main__":
    sys.exit(main())
