"""Every option of a server and of its backends, as data and as flags; the token is never a flag.

This module loads nothing heavy, so that `--help` and BM25 need neither torch nor FAISS.
"""

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from search_r1.options import Bounds, Seed
from search_r1.search.errors import SetupError


@dataclass(frozen=True)
class EncoderConfig:
    """The encoder of dense backends."""

    retriever_model: str | None = None
    """encoder: a folder, a hub name, or `hash` (no model, for trials)"""
    query_model: str | None = None
    """another encoder for queries alone, as dpr has; default: retriever_model"""
    pooling_method: str | None = None
    """mean, cls or pooler; default: what the model folder or its family declares"""
    query_max_length: Annotated[int, Bounds(1)] = 256
    """tokens of a query that are encoded"""
    encoder_dtype: str = "float32"
    """float32, float16 or bfloat16"""
    encoder_batch_size: Annotated[int, Bounds(1)] | None = None
    """texts per encoder call; default: 64 on a GPU, 16 on a CPU"""
    encoder_device: str | None = None
    """cpu, cuda:1 ...; default: a GPU if there is one"""
    compile_encoder: bool = False
    """torch.compile the encoder"""
    trust_remote_code: bool = False
    """run Python code that comes with a model"""
    encoder_family: str | None = None
    """e5, e5-instruct, bge-en, bge, dpr, contriever or other: decides prefixes and pooling;
    default: by the model's name"""


@dataclass(frozen=True)
class FaissConfig:
    """FAISS indexes."""

    faiss_gpu: bool = False
    """search on all GPUs: sharded, in half precision"""
    nprobe: Annotated[int, Bounds(1)] | None = None
    """IVF: lists searched per query"""
    ef_search: Annotated[int, Bounds(1)] | None = None
    """HNSW: candidates kept while searching"""


@dataclass(frozen=True)
class TorchConfig:
    """The exact torch backend, which reads a FAISS Flat index without FAISS."""

    dense_engine: str = "faiss"
    """faiss, or torch for exact search of a Flat index"""
    matrix_dtype: str = "float32"
    """torch backend: float32, float16, bfloat16 or int8"""
    matrix_devices: tuple[str, ...] = ()
    """torch backend: devices that share the matrix; default: all GPUs, else cpu"""
    tile_rows: Annotated[int, Bounds(1)] = 65536
    """torch backend: rows scored at a time"""
    rescore: Annotated[int, Bounds(0)] = 0
    """torch backend: candidates per query scored again in float32 (0: none)"""


@dataclass(frozen=True)
class RerankConfig:
    """A cross-encoder over any backend."""

    reranker_model: str | None = None
    """cross-encoder that orders what the backend finds"""
    retrieval_topk: Annotated[int, Bounds(1)] = 10
    """documents given to the reranker"""
    reranker_batch_size: Annotated[int, Bounds(1)] = 32
    """pairs per reranker call"""
    reranker_max_length: Annotated[int, Bounds(8)] = 512
    """tokens of a pair that are read"""
    reranker_dtype: str = "float32"
    """float32, float16 or bfloat16"""
    reranker_device: str | None = None
    """cpu, cuda:1 ...; default: a GPU if there is one"""


@dataclass(frozen=True)
class OnlineConfig:
    """Online search services; their keys come from the environment only."""

    online_url: str | None = None
    """address of the service, in place of its own"""
    requests_per_second: Annotated[float, Bounds(0.01)] = 5.0
    """most requests sent to the service"""
    online_retries: Annotated[int, Bounds(0)] = 4
    """further tries after a failed request"""
    online_timeout: Annotated[float, Bounds(0.1)] = 15.0
    """seconds for one request, or for all pages of one search"""
    online_cache: str | None = None
    """sqlite file that keeps the service's answers"""
    page_text: bool = False
    """fetch the pages and pass their text instead of the snippet"""
    page_bytes: Annotated[int, Bounds(1)] = 2_000_000
    """bytes read of a page"""
    page_chars: Annotated[int, Bounds(1)] = 2_000
    """characters of a page's text in a document"""


@dataclass(frozen=True)
class DiagnosticConfig:
    """The backends that an agent is judged against."""

    oracle_path: str | None = None
    """oracle: jsonl rows of a question and its supporting passages"""
    replay_path: str | None = None
    """replay: what a server recorded with --record"""
    replay_latency: bool = False
    """replay: wait as long as the recorded search took"""
    seed: Seed = 0
    """random: which documents a query gets"""


@dataclass(frozen=True)
class RetrieverConfig:
    """What is searched and by which backend."""

    retriever_name: str = "bm25"
    """a backend's name, or any name of a dense index such as e5 with --retriever_model"""
    corpus_path: str | None = None
    """jsonl with id and contents"""
    index_path: str | None = None
    """an index, or the folder around it; bm25 builds one beside the corpus if absent"""
    verify: bool = False
    """compare all of index and corpus with their checksums first, not blocks by chance; and read
    every row"""
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    faiss: FaissConfig = field(default_factory=FaissConfig)
    torch: TorchConfig = field(default_factory=TorchConfig)
    rerank: RerankConfig = field(default_factory=RerankConfig)
    online: OnlineConfig = field(default_factory=OnlineConfig)
    diagnostics: DiagnosticConfig = field(default_factory=DiagnosticConfig)


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


@dataclass(frozen=True)
class FaultConfig:
    """Test faults (never in production): requests that fail on purpose."""

    inject_failures: Annotated[float, Bounds(0, 1)] = 0.0
    """share of requests to fail, for tests"""
    inject_hangs: Annotated[float, Bounds(0, 1)] = 0.0
    """share of requests never to answer, for tests"""
    inject_seed: Seed = 0
    """which requests those are"""

    @property
    def is_on(self) -> bool:
        """Whether any request is to fail."""
        return self.inject_failures > 0 or self.inject_hangs > 0

    def check(self) -> None:
        """Raise SetupError for shares that leave nothing to answer."""
        if not self.inject_failures + self.inject_hangs <= 1:
            raise SetupError(
                f"--inject_failures {self.inject_failures:g} and --inject_hangs "
                f"{self.inject_hangs:g}; expected shares of at most 1 together"
            )
