"""Retrieval server: searches a corpus with any backend, for many clients at once.

A bearer token is taken from the environment variable RETRIEVER_TOKEN only, since flags are visible
in the process list; clients then send `Authorization: Bearer TOKEN`. See docs/guides/retrieval.md.
"""

import faulthandler
import logging
import sys

from search_r1.options import run
from search_r1.plain import configure_logging
from search_r1.retrieval.settings import ServerOptions

FALLEN = {
    "--record": "it appended searches to a jsonl file and is gone since 2026-11-28; --cache_path "
    "FILE keeps them in a sqlite file, which --retriever_name replay reads",
    "--compile-encoder": "no gain was measured, and it is gone since 2026-11-29; --encoder_dtype "
    "bfloat16 or another --encoder_device makes an encoder faster",
}


def main(argv: list[str] | None = None) -> int:
    configure_logging(logging.INFO, "%(asctime)s %(levelname)s %(message)s")
    faulthandler.enable(sys.__stderr__ or sys.stderr)  # prints a traceback at SIGBUS
    target, prog = "search_r1.retrieval.server:run", "search-r1 serve-retriever"
    return run(target, ServerOptions, argv, prog=prog, description=__doc__, fallen=FALLEN)


if __name__ == "__main__":
    sys.exit(main())
