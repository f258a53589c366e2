"""What the service allows and keeps, as data and as flags; the token is never a flag."""

from dataclasses import dataclass

from search_r1.search.errors import SetupError
from search_r1.search.options import option

TOKEN_VARIABLE = "RETRIEVER_TOKEN"


@dataclass(frozen=True)
class ServiceConfig:
    """The service: limits, batches, caches, record."""

    topk: int = option(
        3, "documents for a request without topk", at_least=1, also=("reranking_topk",)
    )
    max_topk: int = option(100, "largest topk of a request", at_least=1)
    max_queries: int = option(4096, "most queries in one request", at_least=1)
    max_query_chars: int = option(16384, "longest query, in characters", at_least=1)
    max_body_bytes: int = option(8 * 2**20, "longest request body, in bytes", at_least=64)
    max_pending: int = option(8192, "queries waiting or searching; beyond it 503", at_least=1)
    max_batch: int = option(256, "most queries in one search of the engine", at_least=1)
    batch_wait_ms: float = option(
        2.0, "how long an idle engine waits for more queries (ms)", at_least=0
    )
    cache_entries: int = option(
        100_000, "results kept in memory, the last used (0: none)", at_least=0
    )
    cache_path: str | None = option(None, "sqlite file that keeps results across restarts")
    deadline: float = option(60.0, "seconds a request may take before 504", at_least=0.001)
    drain: float = option(20.0, "seconds to finish accepted requests at shutdown", at_least=0)
    record: str | None = option(None, "jsonl file that receives every search, for `replay`")

    def check(self) -> None:
        """Raise SetupError for limits that contradict each other."""
        if self.topk > self.max_topk:
            raise SetupError(
                f"--topk {self.topk}; expected --max_topk ({self.max_topk}) or less: raise that"
            )
        if self.max_pending < self.max_queries:
            raise SetupError(
                f"--max_pending {self.max_pending}; expected --max_queries ({self.max_queries}) "
                "or more, or a full request could never be accepted"
            )
