"""The options of a retrieval server and its backends, which are also its command-line flags.

The bearer token is never a flag. Nothing heavy is imported, so `--help` and BM25 need no torch.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from search_r1.retrieval.errors import SetupError
from verl.bounds import MAX_SEED, Bounds


@dataclass(frozen=True)
class EncoderConfig:
    """The encoder of dense backends."""

    retriever_model: str | None = None
    """encoder model: folder, Hugging Face name, or `hash` (no model, for trials)"""
    query_model: str | None = None
    """separate encoder for queries, as DPR has; default: --retriever_model"""
    pooling_method: str | None = None
    """mean, cls or pooler; default: as declared by the model folder or its family"""
    query_max_length: Annotated[int, Bounds(1)] = 256
    """longest query in tokens; the rest is cut off"""
    encoder_dtype: str = "float32"
    """data type of the encoder: float32, float16 or bfloat16"""
    encoder_batch_size: Annotated[int, Bounds(1)] | None = None
    """texts per encoder call; default: 64 on a GPU, 16 on a CPU"""
    encoder_device: str | None = None
    """device of the encoder: cpu, cuda:1 ...; default: a GPU if available"""
    trust_remote_code: bool = False
    """run Python code that comes with a model"""
    encoder_family: str | None = None
    """e5, e5-instruct, bge-en, bge, dpr, contriever or other, for prefixes and pooling"""


@dataclass(frozen=True)
class FaissConfig:
    """FAISS indexes."""

    faiss_gpu: bool = False
    """search on all GPUs: sharded, in half precision"""
    nprobe: Annotated[int, Bounds(1)] | None = None
    """IVF: number of lists searched per query"""
    ef_search: Annotated[int, Bounds(1)] | None = None
    """HNSW: number of candidates kept during a search"""


@dataclass(frozen=True)
class TorchConfig:
    """The exact torch backend, which searches a FAISS Flat index without FAISS."""

    dense_engine: str = "faiss"
    """faiss, or torch for exact search of a Flat index"""
    matrix_dtype: str = "float32"
    """torch backend: float32, float16, bfloat16 or int8"""
    matrix_devices: tuple[str, ...] = ()
    """torch backend: devices that share the matrix; default: all GPUs, else cpu"""
    tile_rows: Annotated[int, Bounds(1)] = 65536
    """torch backend: rows scored at a time"""
    rescore: Annotated[int, Bounds(0)] = 0
    """torch backend: candidates per query that are scored again in float32 (0: none)"""


@dataclass(frozen=True)
class RerankConfig:
    """Reranking of any backend's results with a cross-encoder."""

    reranker_model: str | None = None
    """cross-encoder that reranks the backend's results"""
    retrieval_topk: Annotated[int, Bounds(1)] = 10
    """documents passed to the reranker"""
    reranker_batch_size: Annotated[int, Bounds(1)] = 32
    """pairs per reranker call"""
    reranker_max_length: Annotated[int, Bounds(8)] = 512
    """longest pair of query and document in tokens; the rest is cut off"""
    reranker_dtype: str = "float32"
    """data type of the reranker: float32, float16 or bfloat16"""
    reranker_device: str | None = None
    """device of the reranker: cpu, cuda:1 ...; default: a GPU if available"""


@dataclass(frozen=True)
class FusionConfig:
    """How a hybrid, such as bm25+e5, joins the results of its engines."""

    fusion: Literal["scores", "ranks"] = "scores"
    """hybrid: add scores, scaled to 0 … 1 for each query, or reciprocal ranks"""
    fusion_weights: Annotated[tuple[float, ...], Bounds(0)] = ()
    """hybrid: weight of each engine, in the name's order; default: 1; of a static encoder 0.25"""
    fusion_depth: Annotated[int, Bounds(1)] = 20
    """hybrid: documents that each engine contributes"""


@dataclass(frozen=True)
class OnlineConfig:
    """Online search services; their keys come from the environment only."""

    online_url: str | None = None
    """address to use instead of the service's default"""
    requests_per_second: Annotated[float, Bounds(0.01)] = 5.0
    """highest rate of requests to the service"""
    online_retries: Annotated[int, Bounds(0)] = 4
    """retries of a failed request"""
    online_timeout: Annotated[float, Bounds(0.1)] = 15.0
    """seconds for one request (milvus: too), or for all pages of one search"""
    online_cache: str | None = None
    """sqlite file that caches the service's responses"""
    online_budget: Annotated[float, Bounds(0)] | None = None
    """most that the service may cost, by --online_ledger; then searches fail with 402"""
    online_price: Annotated[float, Bounds(1e-6)] = 1.0
    """price of one request; with 1 the budget is a number of requests"""
    online_ledger: str | None = None
    """sqlite file with what was spent, over all starts and servers that use it"""
    answer_boxes: bool = False
    """put the service's own answer, if it has one, before its results: serpapi, serper, tavily"""
    page_text: bool = False
    """fetch the pages and return their text instead of the snippets"""
    page_bytes: Annotated[int, Bounds(1)] = 2_000_000
    """largest number of bytes read from a page"""
    page_chars: Annotated[int, Bounds(1)] = 2_000
    """largest number of characters of a page's text in a document"""
    page_summary_url: str | None = None
    """with --page_text: chat server, http://HOST/v1, that says what a page has about the query"""
    page_summary_model: str | None = None
    """name of the model there"""


@dataclass(frozen=True)
class DiagnosticConfig:
    """Backends for comparisons and diagnosis: oracle, replay and random."""

    oracle_path: str | None = None
    """oracle: jsonl file with questions and their supporting passages"""
    replay_path: str | None = None
    """replay: --cache_path file of another server"""
    replay_latency: bool = False
    """replay: wait as long as the recorded search took"""
    seed: Annotated[int, Bounds(0, MAX_SEED)] = 0
    """random: seed that determines which documents a query gets"""


@dataclass(frozen=True)
class RetrieverConfig:
    """What is searched, and by which backend."""

    retriever_name: str = "bm25"
    """name of a backend; any other name, such as e5, for a dense index with --retriever_model;
    several with + between, such as bm25+e5; or path/file.py:Name, a backend of your own"""
    corpus_path: str | None = None
    """jsonl file with id and contents"""
    index_path: str | None = None
    """index, its folder, or milvus://host:19530/collection; bm25 builds one beside the corpus"""
    verify: bool = False
    """before serving, read every row, and compare index and corpus with the manifest's hashes"""
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    faiss: FaissConfig = field(default_factory=FaissConfig)
    torch: TorchConfig = field(default_factory=TorchConfig)
    rerank: RerankConfig = field(default_factory=RerankConfig)
    fusion: FusionConfig = field(default_factory=FusionConfig)
    online: OnlineConfig = field(default_factory=OnlineConfig)
    diagnostics: DiagnosticConfig = field(default_factory=DiagnosticConfig)


@dataclass(frozen=True)
class ServiceConfig:
    """The service: limits, batching and caches."""

    topk: Annotated[int, Bounds(1), tyro.conf.arg(aliases=("--reranking-topk",))] = 3
    """documents per query for requests without topk"""
    max_topk: Annotated[int, Bounds(1)] = 100
    """largest topk that a request may ask for"""
    max_queries: Annotated[int, Bounds(1)] = 4096
    """largest number of queries in a request"""
    max_query_chars: Annotated[int, Bounds(1)] = 16384
    """longest query, in characters"""
    max_body_bytes: Annotated[int, Bounds(64)] = 8 * 2**20
    """largest request body, in bytes"""
    max_pending: Annotated[int, Bounds(1)] = 8192
    """queries waiting or being searched; beyond this, requests get 503"""
    max_batch: Annotated[int, Bounds(1)] = 256
    """largest number of queries in one search of the backend"""
    batch_wait_ms: Annotated[float, Bounds(0)] = 2.0
    """milliseconds that an idle backend waits for more queries"""
    cache_entries: Annotated[int, Bounds(0)] = 100_000
    """most recently used results kept in memory (0: none)"""
    cache_bytes: Annotated[int, Bounds(0, 2**50)] = 768 * 2**20
    """largest memory of these results, in bytes (0: none)"""
    cache_path: str | None = None
    """sqlite file that keeps results for later servers and for the backend `replay`"""
    deadline: Annotated[float, Bounds(0.001)] = 60.0
    """seconds that a request may take; then it gets 504"""
    drain: Annotated[float, Bounds(0)] = 20.0
    """seconds to finish accepted requests at shutdown"""
    compare_with: tuple[str, ...] = ()
    """http://HOST:PORT of other retrieval servers, which the search page shows beside this one"""

    def check(self) -> None:
        """Raise SetupError for contradictory limits."""
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
        if self.compare_with:
            from search_r1.retrieval.client import read_urls  # noqa: PLC0415 by option

            try:
                read_urls(self.compare_with)
            except ValueError as error:
                raise SetupError(f"--compare_with: got {error}") from error


@dataclass(frozen=True)
class FaultConfig:
    """Injected faults, for tests of clients (never in production)."""

    inject_failures: Annotated[float, Bounds(0, 1)] = 0.0
    """share of requests that fail, for tests"""
    inject_hangs: Annotated[float, Bounds(0, 1)] = 0.0
    """share of requests that are never answered, for tests"""
    inject_seed: Annotated[int, Bounds(0, MAX_SEED)] = 0
    """seed of the faults: the n-th request always has the same outcome"""

    @property
    def is_on(self) -> bool:
        return self.inject_failures > 0 or self.inject_hangs > 0

    def check(self) -> None:
        """Raise SetupError if the shares add up to more than 1."""
        if not self.inject_failures + self.inject_hangs <= 1:
            raise SetupError(
                f"--inject_failures {self.inject_failures:g} and --inject_hangs "
                f"{self.inject_hangs:g}; expected shares of at most 1 together"
            )


@dataclass(frozen=True)
class ServerOptions:
    """The command-line options of the server."""

    COMMON = ("host", "port", "retriever_name", "corpus_path", "index_path", "retriever_model",
              "topk", "encoder_device", "faiss_gpu", "dense_engine", "reranker_model", "online_url",
              "cache_path", "deadline", "replay_path", "max_batch", "workers")  # fmt: skip

    host: str = "127.0.0.1"
    """address to bind to"""
    port: Annotated[int, Bounds(0, 65535)] = 8000
    """port to bind to; 0 picks a free port"""
    port_file: Path | None = None
    """file to which the port is written once requests are accepted"""
    workers: Annotated[int, Bounds(1, 1024)] = 1
    """processes that serve one port and share the index's mapped pages; SIGHUP replaces them"""
    allowed_hosts: tuple[str, ...] = ()
    """names in the Host header besides localhost and the bound address; default: *, unless local"""
    service: ServiceConfig = field(default_factory=ServiceConfig)
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)
