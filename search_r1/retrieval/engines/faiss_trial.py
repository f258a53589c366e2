"""The child process of `faiss_child`: reads a FAISS file, checks its rows and searches it."""

import json
import resource
import sys
from pathlib import Path

import numpy as np

from search_r1.retrieval.engines.faiss_child import ERRORS
from search_r1.retrieval.engines.faiss_index import FaissIndex
from search_r1.retrieval.errors import SearchError
from search_r1.retrieval.settings import FaissConfig

NUM_QUERIES, TOPK = 4, 10
MAX_FACTOR, MAX_BYTES = 8, 64 << 30
"""Address space: this multiple of the file's size, and room for libraries and stacks of threads.
A damaged length would otherwise take all memory of the machine."""


def main() -> int:
    request = json.loads(sys.argv[1])
    path = Path(request["path"])
    _limit_memory(MAX_BYTES + MAX_FACTOR * path.stat().st_size)
    try:
        index = FaissIndex.open(path, FaissConfig(**request["config"]), whole=request["whole"])
        queries = np.random.default_rng(0).normal(size=(NUM_QUERIES, index.dim))
        index.search(queries.astype(np.float32), TOPK)
    except SearchError as error:
        sys.stdout.write(str(error))
        return next(status for status, kind in ERRORS.items() if isinstance(error, kind))
    return 0


def _limit_memory(limit: int) -> None:
    """Limit the address space to `limit` bytes, unless it is already limited to fewer (Linux)."""
    if sys.platform != "linux":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    allowed = [value for value in (soft, hard) if value != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([limit, *allowed]), hard))


if __name__ == "__main__":
    sys.exit(main())
