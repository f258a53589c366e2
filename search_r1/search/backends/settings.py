"""What decides a server's engine: every option of every engine, as data and as flags.

This module loads nothing heavy, so that `--help` and BM25 need neither torch nor FAISS.
"""

from dataclasses import dataclass, field

from search_r1.search.options import option


@dataclass(frozen=True)
class EncoderConfig:
    """The encoder of dense engines."""

    retriever_model: str | None = option(
        None, "encoder: a folder, a hub name, or `hash` (no model, for trials)"
    )
    query_model: str | None = option(
        None, "another encoder for queries alone, as dpr has; default: retriever_model"
    )
    pooling_method: str | None = option(
        None, "mean, cls or pooler; default: what the model folder or its family declares"
    )
    query_max_length: int = option(256, "tokens of a query that are encoded", at_least=1)
    encoder_dtype: str = option("float32", "float32, float16 or bfloat16")
    encoder_batch_size: int | None = option(
        None, "texts per encoder call; default: 64 on a GPU, 16 on a CPU", at_least=1
    )
    encoder_device: str | None = option(None, "cpu, cuda:1 ...; default: a GPU if there is one")
    compile_encoder: bool = option(False, "torch.compile the encoder")
    trust_remote_code: bool = option(False, "run Python code that comes with a model")
    encoder_family: str | None = option(
        None,
        "e5, e5-instruct, bge-en, bge, dpr, contriever or other: decides prefixes and pooling; "
        "default: by the model's name",
    )


@dataclass(frozen=True)
class FaissConfig:
    """FAISS indexes."""

    faiss_gpu: bool = option(False, "search on all GPUs: sharded, in half precision")
    nprobe: int | None = option(None, "IVF: lists searched per query", at_least=1)
    ef_search: int | None = option(None, "HNSW: candidates kept while searching", at_least=1)


@dataclass(frozen=True)
class TorchConfig:
    """The exact torch engine, which reads a FAISS Flat index without FAISS."""

    dense_engine: str = option("faiss", "faiss, or torch for exact search of a Flat index")
    matrix_dtype: str = option("float32", "torch engine: float32, float16, bfloat16 or int8")
    matrix_devices: tuple[str, ...] = option(
        (), "torch engine: devices that share the matrix; default: all GPUs, else cpu"
    )
    tile_rows: int = option(65536, "torch engine: rows scored at a time", at_least=1)
    rescore: int = option(
        0, "torch engine: candidates per query scored again in float32 (0: none)", at_least=0
    )


@dataclass(frozen=True)
class RerankConfig:
    """A cross-encoder over any engine."""

    reranker_model: str | None = option(None, "cross-encoder that orders what the engine finds")
    retrieval_topk: int = option(10, "documents given to the reranker", at_least=1)
    reranker_batch_size: int = option(32, "pairs per reranker call", at_least=1)
    reranker_max_length: int = option(512, "tokens of a pair that are read", at_least=8)
    reranker_dtype: str = option("float32", "float32, float16 or bfloat16")
    reranker_device: str | None = option(None, "cpu, cuda:1 ...; default: a GPU if there is one")


@dataclass(frozen=True)
class OnlineConfig:
    """Online search services; their keys come from the environment only."""

    online_url: str | None = option(None, "address of the service, in place of its own")
    requests_per_second: float = option(5.0, "most requests sent to the service", at_least=0.01)
    online_retries: int = option(4, "further tries after a failed request", at_least=0)
    online_timeout: float = option(15.0, "seconds for one request", at_least=0.1)
    online_cache: str | None = option(None, "sqlite file that keeps the service's answers")
    page_text: bool = option(False, "fetch the pages and pass their text instead of the snippet")
    page_bytes: int = option(2_000_000, "bytes read of a page", at_least=1)
    page_chars: int = option(2_000, "characters of a page's text in a document", at_least=1)


@dataclass(frozen=True)
class DiagnosticConfig:
    """The engines that an agent is judged against."""

    oracle_path: str | None = option(
        None, "oracle: jsonl rows of a question and its supporting passages"
    )
    replay_path: str | None = option(None, "replay: what a server recorded with --record")
    replay_latency: bool = option(False, "replay: wait as long as the recorded search took")
    seed: int = option(0, "random: which documents a query gets")


@dataclass(frozen=True)
class RetrieverConfig:
    """What is searched and by which engine."""

    retriever_name: str = option(
        "bm25", "an engine's name, or any name of a dense index such as e5 with --retriever_model"
    )
    corpus_path: str | None = option(None, "jsonl with id and contents")
    index_path: str | None = option(
        None, "an index, or the folder around it; bm25 builds one beside the corpus if absent"
    )
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    faiss: FaissConfig = field(default_factory=FaissConfig)
    torch: TorchConfig = field(default_factory=TorchConfig)
    rerank: RerankConfig = field(default_factory=RerankConfig)
    online: OnlineConfig = field(default_factory=OnlineConfig)
    diagnostics: DiagnosticConfig = field(default_factory=DiagnosticConfig)


PARTS = {
    "encoder": EncoderConfig,
    "faiss": FaissConfig,
    "torch": TorchConfig,
    "rerank": RerankConfig,
    "online": OnlineConfig,
    "diagnostics": DiagnosticConfig,
}
"""The groups of flags inside RetrieverConfig, by field."""
