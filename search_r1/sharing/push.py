"""`search-r1 push RUN`: a trained model with its card, as a folder or on the hub."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from search_r1.options import run


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """The run to share, and where to."""

    run: tyro.conf.Positional[Path]
    """folder of a finished run, for its model/, or a complete checkpoint global_step_N in one"""
    to: str | None = None
    """model repository of the hub, OWNER/NAME; it is created if it is not there"""
    out: Path | None = None
    """new folder to write instead, for which no network is needed"""
    private: bool = False
    """create the repository as a private one"""
    adapter: bool = False
    """share the LoRA adapter alone, of a run with lora_rank above 0"""
    base_model: str | None = None
    """hub name of the model that was trained, for the card and for an adapter; default: the run's
    own, if it is a hub name"""
    evaluations: tuple[Path, ...] = ()
    """the --out of finished evaluations of these weights, for the card"""
    license: str | None = None
    """license of the weights, as the hub names it; the card states none by default"""
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], tyro.conf.arg(help_behavior_hint="")
    ] = "bfloat16"
    """number format of a checkpoint's weights; model/ is shared as it is"""


def main(argv: Sequence[str] | None = None) -> int:
    """Share the run that the arguments name; returns the exit status."""
    return run("search_r1.sharing.folder:push", PushOptions, argv, prog="search-r1 push",
               description=__doc__)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
