"""`search-r1 data NAME …`, which builds question files and corpora, and its options.

The scripts of `scripts/data_process/` run the same recipes.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from search_r1.options import Bounds, Seed, run
from verl.errors import did_you_mean


@dataclass(frozen=True, kw_only=True)
class SetOptions:
    """Question files of published sets, with the original's arguments and some for local files."""

    local_dir: Path = Path("data/nq_search")
    """folder for the files"""
    hdfs_dir: str | None = None
    """also copy the folder to this path or URI (hdfs://, s3:// or gs://)"""
    template_type: str = "base"
    """wording of the prompt, by name or .yaml file: base is our own, not the one that published
    checkpoints saw (`search-r1 data template` writes that)"""
    local_dataset_path: Path | None = None
    """folder with <set>/<split>.jsonl, instead of the hub"""
    drop_bad_rows: bool = False
    """skip bad rows instead of refusing the files"""


@dataclass(frozen=True, kw_only=True)
class DirectOptions(SetOptions):
    """Question files for answers from memory."""

    local_dir: Path = Path("data/nq")
    """folder for the files"""


@dataclass(frozen=True, kw_only=True)
class MergeOptions(SetOptions):
    """Question files of several published sets."""

    data_sources: str = "nq"
    """names of sets, separated by commas (docs/guides/data.md lists them)"""


@dataclass(frozen=True, kw_only=True)
class RagOptions(SetOptions):
    """Question files with retrieved documents in the prompts."""

    local_dir: Path = Path("data/nq_rag")
    """folder for the files"""
    topk: Annotated[int, Bounds(1)] = 3
    """documents in each prompt"""
    retriever_url: str = "http://127.0.0.1:8000/retrieve"
    """retrieval server that finds the documents"""
    train_retrieval_cache: Path | None = None
    """JSON file with hits for training questions, instead of a server"""
    test_retrieval_cache: Path | None = None
    """the same for test questions"""
    corpus_path: Path | None = None
    """corpus (jsonl) with the passages of the caches"""


@dataclass(frozen=True, kw_only=True)
class OwnOptions:
    """Question files of a user's own questions."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """csv, jsonl or parquet"""
    local_dir: Path = Path("data/own")
    """folder for the files"""
    data_source: str | None = None
    """name of the set for rows without one; default: the file's name"""
    data_sources: str | None = None
    """use only these sets, separated by commas"""
    split: str = ""
    """split for rows without one, instead of dividing them"""
    test_share: Annotated[float, Bounds(0, lt=1)] = 0.1
    """share of the divided questions that goes to the test split"""
    seed: Seed = 0
    """seed of the division"""
    template_type: str = "base"
    """wording of the prompt, by name or .yaml file: base is our own, not the one that published
    checkpoints saw (`search-r1 data template` writes that)"""
    answer_separator: str = "|"
    """separator of several answers in a csv field"""
    drop_bad_rows: bool = False
    """skip bad rows instead of refusing the files"""


@dataclass(frozen=True, kw_only=True)
class HotpotOptions:
    """HotpotQA questions with a small corpus of their paragraphs."""

    local_dir: Path = Path("data/small_hotpotqa")
    """folder for the files"""
    local_dataset_path: Path | None = None
    """folder with hotpotqa/<split>.jsonl, instead of the hub"""
    train: Annotated[int, Bounds(1)] = 3000
    """number of questions of the training split"""
    dev: Annotated[int, Bounds(1)] = 750
    """number of questions of the dev split"""


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """The texts to read and the corpus to write."""

    paths: tyro.conf.Positional[tuple[Path, ...]]
    """folders of .txt, .md, .html and .pdf, and files of rows (jsonl of BEIR, KILT or other names,
    tsv of DPR, parquet), also with .gz"""
    out: Path = Path("data/own/corpus.jsonl")
    """corpus file to write"""
    max_words: Annotated[int, Bounds(1)] = 100
    """maximum number of words in a passage, as in wiki-18; two characters of a script without
    spaces (Chinese, Japanese, Thai, ...) count as one"""
    chunk_size: Annotated[int, Bounds(1)] | None = None
    """maximum number of tokens in a passage, instead of --max_words; the title is not counted"""
    tokenizer: str | None = None
    """tokenizer that counts them: the encoder's folder or hub name, or a tokenizer.json"""
    chunk_overlap: Annotated[int, Bounds(0)] = 0
    """most words or tokens at the end of a passage that the next one repeats"""
    keep_rows: bool = False
    """leave rows of tables whole, with their ids, however long they are"""
    drop_bad_rows: bool = False
    """leave out files and rows that cannot be used, instead of refusing all"""


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """The question files to audit, and the corpus that is searched."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """parquet or jsonl: rows of question files, or questions with their answers"""
    corpus_path: Path
    """corpus (jsonl) of the server"""
    retriever_url: str = "http://127.0.0.1:8000/retrieve"
    """retrieval server that searches for the questions"""
    local_dir: Path = Path("data/audited")
    """folder for the files with the new columns"""
    topk: Annotated[int, Bounds(1)] = 3
    """documents of each search"""
    normalize: Literal["squad", "unicode"] = "squad"
    """rule by which answers are looked for, as in `reward_model.normalize`"""
    processes: Annotated[int, Bounds(1)] | None = None
    """processes that scan the corpus; default: one for each core"""


@dataclass(frozen=True, kw_only=True)
class DifficultyOptions:
    """The question files, and evaluations of them with several samples for each question."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """parquet or jsonl files that were evaluated"""
    evaluations: tuple[Path, ...] = ()
    """the --out of each `search-r1 evaluate --n 8 --temperature 1`"""
    local_dir: Path = Path("data/rated")
    """folder for the files with the new columns"""


@dataclass(frozen=True, kw_only=True)
class DemonstrationOptions:
    """The question files, and evaluations of them by any model."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """parquet or jsonl files that were evaluated, whose prompts the demonstrations get"""
    evaluations: tuple[Path, ...] = ()
    """the --out of each `search-r1 evaluate`, best with several samples for each question"""
    out: Path = Path("data/demonstrations.jsonl")
    """file to write, the train_file of `verl.trainer.sft`"""
    measure: Literal["em", "f1", "cover_em", "judge"] = "em"
    """measure that decides"""
    min_score: Annotated[float, Bounds(le=1)] = 1.0
    """lowest value of it"""
    per_question: Annotated[int, Bounds(1)] = 1
    """most dialogues of a question"""
    seed: Seed = 0
    """seed of the choice among them"""


@dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """The file whose wording is wanted, and the template to write."""

    source: Annotated[str, tyro.conf.arg(name="from")] = ""
    """parquet or jsonl file with a column prompt, such as a published training file, or a data set
    of the hub as OWNER/NAME:SPLIT"""
    out: Path = Path("template.yaml")
    """template to write, for template= and --template_type"""


PACKAGE = "search_r1.datasets"
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
    "own_corpus": (CorpusOptions, "own:build_corpus", "folders and files of texts as a corpus"),
    "small_hotpotqa": (HotpotOptions, "small_hotpotqa:build",
                       "HotpotQA questions with a small corpus"),
    "audit": (AuditOptions, "audit:build", "question files with columns that say where the "
              "evidence for each answer is in a corpus"),
    "difficulty": (DifficultyOptions, "difficulty:build", "question files with a column of pass "
                   "rates"),
    "demonstrations": (DemonstrationOptions, "demonstrations:build", "demonstrations for "
                       "supervised training from right dialogues of evaluations"),
    "template": (TemplateOptions, "template:build", "a template with the wording of a file's "
                 "prompts, which a published checkpoint saw"),
}  # fmt: skip
"""Options, build function and description of each recipe, by name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe that the arguments name; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in RECIPES:
        return build(arguments[0], arguments[1:])
    lines = [f"  {name:22} {about}" for name, (_, _, about) in RECIPES.items()]
    text = "\n".join(["usage: search-r1 data NAME ...", "", *lines, ""])
    if arguments and arguments[0] not in ("-h", "--help"):
        fix = did_you_mean(arguments[0], RECIPES, "search-r1 data --help lists them")
        sys.stderr.write(f"search-r1 data: got {arguments[0]}, expected a name; fix: {fix}\n")
        return 2
    sys.stdout.write(text)
    return 0 if arguments else 2


def build(name: str, argv: Sequence[str] | None = None) -> int:
    """Run one recipe; a user's mistake is one message and exit status 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    options, function, about = RECIPES[name]
    return run(f"{PACKAGE}.{function}", options, argv, prog=f"search-r1 data {name}",
               description=f"Builds {about}.")  # fmt: skip
