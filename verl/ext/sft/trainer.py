"""Supervised fine-tuning on demonstrations: `python -m verl.trainer.sft key=value …`.

The options are checked before heavy packages are imported; the training is in `verl.ext.sft.run`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from verl.ext.sft.options import help_text, parse
from verl.logs import exit_status, start_logging


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help", "--help-all"} & {*words}:
        return exit_status(lambda: print(help_text("--help-all" in words)))  # noqa: T201
    start_logging(logging.INFO)
    status = exit_status(lambda: _main(words), "stopped; no model was written")
    if status == 0 and "TORCHELASTIC_RUN_ID" in os.environ:
        # Threads of gloo may still release tensors, which aborts a rank whose interpreter is
        # shutting down; torchrun would then report a failed run.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return status


def _main(arguments: Sequence[str]) -> None:
    config = parse(arguments)
    from verl.ext.sft.run import train  # noqa: PLC0415 - torch and transformers: seconds

    train(config)


if __name__ == "__main__":
    sys.exit(main())
