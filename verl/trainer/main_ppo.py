"""`python3 -m verl.trainer.main_ppo key=value ...` trains; `--cfg job` prints the options instead.

User mistakes end in one message and exit code 2, before any long work starts. Heavy packages are
imported only after the options have been checked, so that a mistyped option is reported at once;
the training is in `verl.trainer.run`.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Sequence

from verl.config import cli
from verl.errors import Interrupted, UserError
from verl.logs import exit_status, start_logging


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    stopped = "stopped; trainer.resume_mode=auto continues from the last checkpoint"
    return exit_status(lambda: _main(arguments), stopped)


def _main(argv: Sequence[str]) -> int:
    start_logging(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    configs = cli.compose_runs(argv)
    gc.disable()  # the imports create a million objects that are never freed
    from verl.trainer.run import run  # noqa: PLC0415 - torch, Ray, transformers: seconds

    gc.enable()
    status = 0
    for config in configs:  # several with --multirun; a failed run does not stop the next one
        try:
            run(config)
        except UserError as error:
            sys.stderr.write(f"{error}\n")
            status = status or error.exit_code
            if isinstance(error, Interrupted):
                break
    return status


if __name__ == "__main__":
    sys.exit(main())
