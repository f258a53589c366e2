"""Search backends for `SearchR1Trainer`."""

from pathlib import Path

from search_r1.retrieval.encoders.families import family_of, model_name
from search_r1.retrieval.local_server import LocalServer
from verl.errors import ConfigError, explain

LOADING_TIMEOUT_S = 3600.0
"""Maximum seconds for the server to load its index."""


class DenseRetriever(LocalServer):
    """A FAISS index of a corpus, served on this machine during a run."""

    def __init__(
        self,
        index_path: str | Path,
        embedding_model: str,
        top_k: int = 3,
        chunk_size: int | None = None,
        corpus_path: str | Path | None = None,
    ) -> None:
        """Check the arguments without starting the server. Raises ConfigError.

        `index_path`: output of `search-r1 index`, or a plain FAISS file. `embedding_model`: folder
        or hub name of its encoder. `chunk_size`: maximum tokens per passage, in the policy's
        tokenizer. `corpus_path`: by default the only jsonl corpus near the index.
        """
        for name, number in (("top_k", top_k), ("chunk_size", chunk_size)):
            if number is not None and (not isinstance(number, int) or number < 1):
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
        corpus = Path(corpus_path) if corpus_path is not None else find_corpus(index)
        indexes = list(index.glob("*_*.index"))  # empty if the path is an index file itself
        name = indexes[0].name.rpartition("_")[0] if len(indexes) == 1 else name
        args = ["--retriever_name", name, "--index_path", str(index),
                "--corpus_path", str(corpus), "--retriever_model", embedding_model,
                "--topk", str(top_k), "--max_topk", str(max(100, top_k))]  # fmt: skip
        super().__init__(args, timeout=LOADING_TIMEOUT_S)


def find_corpus(index: Path) -> Path:
    """Find the only corpus in the folder of an index, its parent or its grandparent."""
    start = index.absolute() if index.is_dir() else index.absolute().parent
    for folder in (start, *start.parents[:2]):
        corpora = [path for path in sorted(folder.glob("*.jsonl")) if _is_corpus(path)]
        if len(corpora) == 1:
            return corpora[0]
        if corpora:
            break
    got = ", ".join(path.name for path in corpora) or "none"
    expected = "one jsonl file of passages near the index"
    raise ConfigError(explain(f"corpus of {index}", got, expected, "name it: corpus_path=FILE"))


def _is_corpus(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.readline(1 << 16)
    return b'"contents"' in head or b'"text"' in head
