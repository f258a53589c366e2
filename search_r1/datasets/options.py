"""Options of `search-r1 data`: one dataclass for each kind of question file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from search_r1.options import Bounds, Seed
from search_r1.search.index.passages import MAX_WORDS


@dataclass(frozen=True, kw_only=True)
class SetOptions:
    """Question files of published sets: the arguments of the original, and ours for local files."""

    local_dir: Path = Path("data/nq_search")
    """folder for the files"""
    hdfs_dir: str | None = None
    """copy the folder there too: a path, hdfs://, s3:// or gs://"""
    template_type: str = "base"
    """wording of the prompt; base is the paper's (docs/data.md names the others)"""
    local_dataset_path: Path | None = None
    """folder <set>/<split>.jsonl instead of a hub"""
    drop_bad_rows: bool = False
    """leave bad rows out instead of refusing"""


@dataclass(frozen=True, kw_only=True)
class DirectOptions(SetOptions):
    """Question files to be answered from memory."""

    local_dir: Path = Path("data/nq")
    """folder for the files"""


@dataclass(frozen=True, kw_only=True)
class MergeOptions(SetOptions):
    """Question files of several published sets."""

    data_sources: str = "nq"
    """names of sets with commas between them, as in docs/data.md"""


@dataclass(frozen=True, kw_only=True)
class RagOptions(SetOptions):
    """Question files with found documents in the prompts."""

    local_dir: Path = Path("data/nq_rag")
    """folder for the files"""
    topk: Annotated[int, Bounds(1)] = 3
    """documents in each prompt"""
    retriever_url: str = "http://127.0.0.1:8000/retrieve"
    """server that finds the documents"""
    train_retrieval_cache: Path | None = None
    """JSON of hits instead of a server"""
    test_retrieval_cache: Path | None = None
    """the same for test questions"""
    corpus_path: Path | None = None
    """jsonl that the caches' ids belong to"""


@dataclass(frozen=True, kw_only=True)
class OwnOptions:
    """Question files of a user's own questions."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """csv, jsonl or parquet"""
    local_dir: Path = Path("data/own")
    """folder for the files"""
    data_source: str | None = None
    """name of the set where rows have none; default: the file's name"""
    data_sources: str | None = None
    """take only these sets, with commas"""
    split: str = ""
    """split of rows that name none, instead of dividing them"""
    test_share: Annotated[float, Bounds(0, lt=1)] = 0.1
    """share of the divided questions that is for testing"""
    seed: Seed = 0
    """of the division"""
    template_type: str = "base"
    """wording of the prompt; base is the paper's (docs/data.md names the others)"""
    answer_separator: str = "|"
    """between answers in a csv field"""
    drop_bad_rows: bool = False
    """leave bad rows out instead of refusing"""


@dataclass(frozen=True, kw_only=True)
class HotpotOptions:
    """HotpotQA questions with a small corpus of their own paragraphs."""

    local_dir: Path = Path("data/small_hotpotqa")
    """folder for the files"""
    local_dataset_path: Path | None = None
    """folder hotpotqa/<split>.jsonl instead of a hub"""
    train: Annotated[int, Bounds(1)] = 3000
    """questions of the training split"""
    dev: Annotated[int, Bounds(1)] = 750
    """questions of the dev split"""


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """What is read, and where the corpus is written."""

    folder: tyro.conf.Positional[Path]
    """texts in UTF-8; folders inside are read too"""
    out: Path = Path("data/own/corpus.jsonl")
    """the corpus"""
    max_words: Annotated[int, Bounds(1)] = MAX_WORDS
    """words of a passage"""
