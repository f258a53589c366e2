"""`search-r1 data NAME …`: question files and corpora; the scripts of `scripts/data_process/`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from search_r1.datasets.options import (
    CorpusOptions,
    DirectOptions,
    HotpotOptions,
    MergeOptions,
    OwnOptions,
    RagOptions,
    SetOptions,
)
from search_r1.options import run

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
        fix = "search-r1 data --help lists them"
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
