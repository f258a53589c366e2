"""The command line of checkpoints: `python -m verl.checkpoint export STEP_DIR --out DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl.config.policy import DTYPES, EXPORTED
from verl.logs import exit_status
from verl.remote_code import set_trust


def main(arguments: Sequence[str] | None = None) -> int:
    """Export a checkpoint as the arguments say; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m verl.checkpoint", description="Checkpoints of a training run."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("export", help="write a Hugging Face folder")
    command.add_argument("step_dir", type=Path, help="a global_step_N folder")
    command.add_argument("--out", type=Path, required=True, help="folder to write")
    command.add_argument(
        "--base", help="model whose config and tokenizer to use, and to merge an adapter into"
    )
    command.add_argument("--adapter", action="store_true", help="write only the adapter, for peft")
    text = f"number format of the weights (default: {EXPORTED})"
    command.add_argument("--dtype", choices=DTYPES, default=EXPORTED, help=text)
    command.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python code in the model's folder"
    )
    options = parser.parse_args(arguments)
    return exit_status(lambda: _export(options))


def _export(options: argparse.Namespace) -> None:
    from verl.checkpoint.exporting import export  # noqa: PLC0415 - torch: seconds

    set_trust(options.trust_remote_code)
    folder = export(options.step_dir, options.out, options.base, options.dtype, options.adapter)
    print(folder)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
