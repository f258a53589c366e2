"""What the service allows and keeps, as data and as flags; the token is never a flag."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from search_r1.options import Bounds
from search_r1.search.errors import SetupError

TOKEN_VARIABLE = "RETRIEVER_TOKEN"


@dataclass(frozen=True)
class ServiceConfig:
    """The service: limits, batches, caches, record."""

    topk: Annotated[int, Bounds(1), tyro.conf.arg(aliases=("--reranking-topk",))] = 3
    """documents for a request without topk"""
    max_topk: Annotated[int, Bounds(1)] = 100
    """largest topk of a request"""
    max_queries: Annotated[int, Bounds(1)] = 4096
    """most queries in one request"""
    max_query_chars: Annotated[int, Bounds(1)] = 16384
    """longest query, in characters"""
    max_body_bytes: Annotated[int, Bounds(64)] = 8 * 2**20
    """longest request body, in bytes"""
    max_pending: Annotated[int, Bounds(1)] = 8192
    """queries waiting or searching; beyond it 503"""
    max_batch: Annotated[int, Bounds(1)] = 256
    """most queries in one search of the engine"""
    batch_wait_ms: Annotated[float, Bounds(0)] = 2.0
    """how long an idle engine waits for more queries (ms)"""
    cache_entries: Annotated[int, Bounds(0)] = 100_000
    """results kept in memory, the last used (0: none)"""
    cache_bytes: Annotated[int, Bounds(0, 2**50)] = 768 * 2**20
    """memory of these results, in bytes (0: none)"""
    cache_path: str | None = None
    """sqlite file that keeps results across restarts"""
    deadline: Annotated[float, Bounds(0.001)] = 60.0
    """seconds a request may take before 504"""
    drain: Annotated[float, Bounds(0)] = 20.0
    """seconds to finish accepted requests at shutdown"""
    record: str | None = None
    """jsonl file that receives every search, for `replay`"""

    def check(self) -> None:
        """Raise SetupError for limits that contradict each other."""
        if self.topk > self.max_topk:
            raise SetupError(
                f"--topk {self.topk}; expected --max_topk ({self.max_topk}) or less: raise that"
            )
        if self.batch_wait_ms >= 1000 * self.deadline:
            raise SetupError(
                f"--batch_wait_ms {self.batch_wait_ms:g}; expected less than --deadline "
                f"({self.deadline:g} s), or no search would begin in time"
            )
        if self.max_pending < self.max_queries:
            raise SetupError(
                f"--max_pending {self.max_pending}; expected --max_queries ({self.max_queries}) "
                "or more, or a full request could never be accepted"
            )
