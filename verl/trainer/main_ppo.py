"""`python3 -m verl.trainer.main_ppo key=value ...` trains; `--cfg job` prints the options instead.

User mistakes end in one message and exit code 2, before any long work starts. Nothing heavy is
imported before the options are sound, so that a mistyped one is answered at once; what trains is
`verl.trainer.run`.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Sequence

from verl.config import cli
from verl.errors import Interrupted, UserError
from verl.files import is_of_files
from verl.logs import start_logging


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry; returns the exit code."""
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        sys.stderr.write("stopped; trainer.resume_mode=auto goes on from the last checkpoint\n")
        return 130
    except OSError as error:
        if not is_of_files(error):
            raise
        sys.stderr.write(f"{error}\n")
        return 2


def _main(argv: Sequence[str]) -> int:
    start_logging(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        configs = cli.compose_runs(argv)
    except UserError as error:
        return _answer(error)
    gc.disable()  # what is imported makes a million objects, which stay
    from verl.trainer.run import run  # noqa: PLC0415 - torch, Ray, transformers: seconds

    gc.enable()
    status = 0
    for config in configs:  # several with --multirun: one that fails does not stop the next
        try:
            run(config)
        except UserError as error:
            status = status or _answer(error)
            if isinstance(error, Interrupted):
                break
    return status


def _answer(error: UserError) -> int:
    sys.stderr.write(f"{error}\n")
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
