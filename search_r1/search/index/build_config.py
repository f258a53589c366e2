"""What to index, how and where to: options of `index_builder` as data and as flags."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from search_r1.options import Bounds


@dataclass(frozen=True)
class BuildConfig:
    """What to index, how, and where to."""

    retrieval_method: str
    """bm25, or a name for a dense index such as e5"""
    corpus_path: str
    """jsonl with id and contents"""
    save_dir: str
    """folder that receives the index"""
    model_path: str | None = None
    """encoder: a folder, a hub name, or `hash` (no model, for trials); dense needs it"""
    use_fp16: bool = False
    """encode in half precision"""
    max_length: Annotated[int, Bounds(1)] | None = None
    """tokens of a passage that are encoded; default: the model's own limit"""
    batch_size: Annotated[int, Bounds(1)] = 64
    """passages per encoder call"""
    pooling_method: str | None = None
    """mean, cls or pooler; default: what the model folder or its family declares"""
    encoder_family: str | None = None
    """e5, e5-instruct, bge-en, bge, dpr, contriever or other: decides prefixes and pooling;
    default: by the model's name"""
    devices: tuple[str, ...] = ()
    """devices that share the encoding, one process each; default: all GPUs, else cpu"""
    faiss_type: str = "Flat"
    """a FAISS factory: Flat, HNSW64, SQ8, IVF4096,Flat ..."""
    faiss_gpu: bool = False
    """train IVF lists on the GPUs that FAISS sees"""
    embedding_dtype: str = "float32"
    """float32 or float16: how embeddings are kept"""
    save_embedding: bool = False
    """keep the embeddings beside the index"""
    embedding_path: str | None = None
    """index these embeddings (.npy, or bare values) instead of encoding the corpus"""
    shard_rows: Annotated[int, Bounds(1)] = 1024
    """documents between two saves, the most that a killed build loses"""
    trust_remote_code: bool = False
    """run Python code that comes with a model"""


@dataclass(frozen=True)
class ChecksumConfig:
    """Whose checksums are kept or compared."""

    index_path: str | None = None
    """the folder of an index, or a bare FAISS file"""
    corpus_path: str | None = None
    """its corpus, which a bare FAISS file is served with from then on, and no other"""
    verify: bool = False
    """compare all with the checksums that are there"""


def index_folder(save_dir: str | Path, method: str, faiss_type: str = "Flat") -> Path:
    """Where `build_index` puts the index of `method`."""
    factory = re.sub(r"[^A-Za-z0-9]+", "_", faiss_type)
    return Path(save_dir) / ("bm25" if method == "bm25" else f"{method}_{factory}.index")
