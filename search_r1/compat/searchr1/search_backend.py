"""What finds documents, as `SearchR1Trainer` takes it."""

from pathlib import Path

from search_r1.search.encoders.families import family_of, model_name
from search_r1.search.local_server import LocalServer
from verl.errors import ConfigError, explain

LOADING_S = 3600.0
"""Longest that a server may take to load its index."""


class DenseRetriever(LocalServer):
    """A FAISS index of a corpus, served on this machine while a run lasts."""

    def __init__(
        self,
        index_path: str | Path,
        embedding_model: str,
        top_k: int = 3,
        chunk_size: int | None = None,
        corpus_path: str | Path | None = None,
    ) -> None:
        """Nothing is started yet. Raises ConfigError.

        `index_path` is what `search-r1 index` built, or a bare FAISS file; `embedding_model` (a
        folder or hub name) its encoder. `chunk_size`: tokens of the policy's tokenizer that each
        passage may take of a dialogue. `corpus_path`: default: the one jsonl file beside the index.
        """
        for name, number in (("top_k", top_k), ("chunk_size", chunk_size or 1)):
            if not isinstance(number, int) or number < 1:
                expected = "a whole number, 1 or more"
                raise ConfigError(explain(name, repr(number), expected, "give one"))
        self.top_k, self.chunk_size = top_k, chunk_size
        index = Path(index_path)
        name = family_of(model_name(embedding_model)).name
        if not index.exists():
            fix = (
                f"search-r1 index --retrieval_method {name} --model_path {embedding_model} "
                f"--corpus_path CORPUS.jsonl --save_dir {index}"
            )
            raise ConfigError(explain("index_path", index, "an index that exists", fix))
        corpus = Path(corpus_path) if corpus_path is not None else corpus_beside(index)
        indexes = list(index.glob("*_*.index"))  # none where the path is an index itself
        name = indexes[0].name.rpartition("_")[0] if len(indexes) == 1 else name
        args = ["--retriever_name", name, "--index_path", str(index),
                "--corpus_path", str(corpus), "--retriever_model", embedding_model,
                "--topk", str(top_k), "--max_topk", str(max(100, top_k))]  # fmt: skip
        super().__init__(args, timeout=LOADING_S)


def corpus_beside(index: Path) -> Path:
    """The only corpus in the folder of an index, or in one of the two around it."""
    start = index.absolute() if index.is_dir() else index.absolute().parent
    for folder in (start, *start.parents[:2]):
        found = [path for path in sorted(folder.glob("*.jsonl")) if _is_corpus(path)]
        if len(found) == 1:
            return found[0]
        if found:
            break
    got = ", ".join(path.name for path in found) or "none"
    expected = "one jsonl file of passages beside the index"
    raise ConfigError(explain(f"corpus of {index}", got, expected, "name it: corpus_path=FILE"))


def _is_corpus(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.readline(1 << 16)
    return b'"contents"' in head or b'"text"' in head
