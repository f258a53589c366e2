"""`search-r1 data NAME …`: question files and corpora; the scripts of `scripts/data_process/`."""

import difflib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from search_r1.options import Bounds, Seed, run
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


HERE = "search_r1.datasets"
RECIPES: dict[str, tuple[type, str, str]] = {
    "nq": (DirectOptions, "published:nq", "Natural Questions from memory: the direct baseline"),
    "nq_rag": (RagOptions, "published:nq_rag",
               "Natural Questions with documents in the prompts: the RAG baseline"),
    "nq_search": (SetOptions, "published:nq_search", "Natural Questions for an agent"),
    "qa_search_train_merge": (MergeOptions, "published:qa_search_train_merge",
                              "training questions of several sets for an agent"),
    "qa_search_test_merge": (MergeOptions, "published:qa_search_test_merge",
                             "test questions of several sets for an agent"),
    "own_questions": (OwnOptions, "own:build", "questions of your own files"),
    "own_corpus": (CorpusOptions, "own:build_corpus", "a folder of texts as a corpus"),
    "small_hotpotqa": (HotpotOptions, "small_hotpotqa:build",
                       "HotpotQA questions with a small corpus"),
}  # fmt: skip
"""Name -> its options, the function that builds it, and what it is."""


def main(argv: Sequence[str] | None = None) -> int:
    """Hand the arguments to the recipe that they name; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in RECIPES:
        return build(words[0], words[1:])
    rows = [f"  {name:22} {about}" for name, (_, _, about) in RECIPES.items()]
    text = "\n".join(["usage: search-r1 data NAME ...", "", *rows, ""])
    if words and words[0] not in ("-h", "--help"):
        near = difflib.get_close_matches(words[0], RECIPES, n=1)
        fix = f"search-r1 data {near[0]}" if near else "search-r1 data --help lists them"
        sys.stderr.write(f"data: got {words[0]}, expected a name; fix: {fix}\n")
        return 2
    sys.stdout.write(text)
    return 0 if words else 2


def build(name: str, argv: Sequence[str] | None = None) -> int:
    """Build one kind of file; a user's mistake ends in one message and status 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    options, work, about = RECIPES[name]
    return run(f"{HERE}.{work}", options, argv, prog=name, description=f"Builds {about}.")
