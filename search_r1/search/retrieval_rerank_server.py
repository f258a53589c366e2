"""Search with a reranker under the original Search-R1's name, flags and default models.

`--reranking_topk` is the same as `--topk`; see docs/start/migration.md.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file: the project may not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from search_r1.retrieval import command

DEFAULTS = ["--retriever_name", "e5", "--retriever_model", "intfloat/e5-base-v2"]
DEFAULTS += ["--reranker_model", "cross-encoder/ms-marco-MiniLM-L12-v2"]


def main(argv: list[str] | None = None) -> int:
    return command.main(DEFAULTS + (sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
