"""`python3 -m verl.trainer.main_ppo key=value ...` trains; `--cfg job` prints the options instead.

User mistakes end in one message and exit code 2, before any long work starts. Nothing heavy is
imported before the options are sound, so that a mistyped one is answered at once; what trains is
`verl.trainer.run`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from verl.config import cli
from verl.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        config = cli.compose(sys.argv[1:] if argv is None else argv)
        from verl.trainer.run import run  # noqa: PLC0415 - torch, Ray, transformers: seconds

        run(config)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
