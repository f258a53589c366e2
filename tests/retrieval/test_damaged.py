"""Damaged or foreign files of every backend: one line, status 2, and nothing is served."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import faiss
import numpy as np
import pytest

from search_r1.retrieval import command
from search_r1.retrieval import server as retrieval_server
from search_r1.retrieval.index_builder import main as build
from search_r1.retrieval.settings import (
    DiagnosticConfig,
    EncoderConfig,
    RetrieverConfig,
    ServerOptions,
    TorchConfig,
)
from tests.retrieval.conftest import write_corpus

Damage = Callable[[Path], object]
NAN = float("nan")
BM25 = ("manifest.json", "data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy",
        "vocab.index.json", "params.index.json")  # fmt: skip
DENSE = ("manifest.json", "vectors.faiss")


def overwrite(path: Path, data: bytes | str) -> None:
    """Overwrite a file in place and keep its mtime, as a failing disk would."""
    status = path.stat()
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def cut(share: float) -> Damage:
    return lambda path: overwrite(path, (data := path.read_bytes())[: int(share * len(data))])


def flip(share: float) -> Damage:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[min(len(data) - 1, int(share * len(data)))] ^= 4
        overwrite(path, bytes(data))

    return damage


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


ANY_FILE: dict[str, Damage] = {
    "empty": cut(0),
    "first-half": cut(0.5),
    "last-byte-lost": cut(0.9999),
    "one-byte-more": lambda path: overwrite(path, path.read_bytes() + b"\n"),
    "flip-first": flip(0),
    "flip-middle": flip(0.5),
    "flip-last": flip(1),
    "zeros": lambda path: overwrite(path, bytes(path.stat().st_size)),
    "missing": Path.unlink,
    "folder": replace_by_folder,
    "unreadable": lambda path: path.chmod(0),
}
"""Damage that can happen to any file."""
UNNOTICED = ("last-byte-lost", "one-byte-more", "flip-middle")
"""Of these, what may leave a valid manifest: white space at its end, a digit."""


def values(**changes: object) -> Damage:
    """Change some values of a JSON file (`...`: remove)."""

    def damage(path: Path) -> None:
        changed = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({k: v for k, v in changed.items() if v is not ...}))

    return damage


def text(content: str) -> Damage:
    return lambda path: path.write_text(content, encoding="utf-8", errors="surrogatepass")


FOREIGN_JSON = {
    "garbage": text("}{"),
    "list": text("[]"),
    "null": text("null"),
    "number": text("1e999"),
    "deep": text("[" * 100_000),
    "not-utf8": lambda path: path.write_bytes(b'{"\xff": 1}'),
    "surrogate": text('{"\\ud800": 1}'),
}
MANIFESTS = FOREIGN_JSON | {
    "another-version": values(vectors=7),
    "no-corpus": values(corpus=...),
    "corpus-of-text": values(corpus="ab"),
    "corpus-unknown-field": values(corpus={"count": 8, "size": 1, "digest": "", "x": 1}),
    "count-of-text": values(count="many"),
    "other-digest": values(corpus={"count": 8, "size": 9, "digest": "0" * 16}),
}
DENSE_MANIFESTS = MANIFESTS | {
    "probe-nan": values(probe=[NAN] * 64),
    "probe-none": values(probe=None),
    "probe-short": values(probe=[1.0]),
    "probe-deep": values(probe=[[1.0]] * 64),
    "probe-text": values(probe=["a"] * 64),
    "probe-other": values(probe=[1.0] * 64),
    "dim-other": values(dim=32),
}


def vectors(path: Path) -> np.ndarray:
    index = faiss.read_index(str(path))
    rows: np.ndarray = index.reconstruct_n(0, index.ntotal)
    return rows


def index_of(change: Callable[[np.ndarray], np.ndarray], factory: str = "Flat") -> Damage:
    """Replace a FAISS file by one with other vectors or of another kind."""

    def damage(path: Path) -> None:
        rows = change(vectors(path)).astype(np.float32)
        index = faiss.index_factory(rows.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
        if not index.is_trained:
            index.train(np.nan_to_num(rows))
        if factory.startswith("IDMap"):
            index.add_with_ids(rows, np.arange(len(rows)) + 5)
        else:
            index.add(rows)
        faiss.write_index(index, str(path))

    return damage


def at(row: int, value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(rows: np.ndarray) -> np.ndarray:
        rows[row, 5] = value
        return rows

    return change


def header(offset: int, data: bytes) -> Damage:
    """Overwrite bytes in the header of a Flat index."""

    def damage(path: Path) -> None:
        old = bytearray(path.read_bytes())
        old[offset : offset + len(data)] = data
        path.write_bytes(old)

    return damage


def ids_beyond(path: Path) -> None:
    rows = vectors(path)
    index = faiss.index_factory(rows.shape[1], "IVF1,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(rows)
    index.add_with_ids(rows, np.arange(len(rows)) + 100)
    faiss.write_index(index, str(path))


FAISS = {
    "garbage": text("no index"),
    "jsonl": text('{"id": 1, "contents": "a long enough row to hold a header of an index"}'),
    "header-only": lambda path: path.write_bytes(path.read_bytes()[:45]),
    "kind-only": lambda path: path.write_bytes(b"IxFI"),
    "dim-0": header(4, bytes(4)),
    "dim-huge": header(4, b"\xff\xff\xff\x7f"),
    "rows-negative": header(8, b"\xff" * 8),
    "rows-huge": header(8, b"\xff\xff\xff\xff\xff\xff\x00\x00"),
    "metric-l1": header(33, b"\x02"),
    "values-more": header(37, b"\xff\xff"),
    "fewer-rows": index_of(lambda rows: rows[:-1]),
    "more-rows": index_of(lambda rows: np.r_[rows, rows[:1]]),
    "other-dim": index_of(lambda rows: rows[:, :32]),
    "infinite": index_of(at(3, np.inf)),
    "other-order": index_of(lambda rows: rows[::-1].copy()),
    "binary": lambda path: faiss.write_index_binary(faiss.IndexBinaryFlat(64), str(path)),
}
TORCH = {
    "nan-first": index_of(at(0, NAN)),
    "nan-last": index_of(at(-1, NAN)),
    "kind-of-hnsw": header(0, b"IHNf"),
    "kind-of-ivf": header(0, b"IwFl"),
}
"""Files with vectors that FAISS never finds, or that may end the process that reads them."""
INDEX_TYPES = {
    "infinite-half": index_of(at(3, np.inf), "SQfp16"),
    "other-order-hnsw": index_of(lambda rows: rows[::-1].copy(), "HNSW4"),
    "ids-map": index_of(lambda rows: rows, "IDMap,Flat"),
    "ids-ivf": ids_beyond,
}


def rows(*changed: str) -> Damage:
    """Replace the last rows of a corpus."""

    def damage(path: Path) -> None:
        old = path.read_text().splitlines()
        content = "\n".join([*old[: len(old) - len(changed)], *changed])
        path.write_text(content, encoding="utf-8", errors="surrogatepass")

    return damage


CORPORA = {
    "garbage": rows("}{"),
    "no-object": rows('["a"]'),
    "no-contents": rows('{"id": "1"}'),
    "id-bool": rows('{"id": true, "contents": "a"}'),
    "contents-number": rows('{"id": "1", "contents": 1}'),
    "id-twice": rows('{"id": "d0", "contents": "a"}'),
    "id-twice-as-number": rows('{"id": "7", "contents": "a"}', '{"id": 7, "contents": "a"}'),
    "surrogate": rows('{"id": "1", "contents": "a \\ud800"}'),
    "surrogate-id": rows('{"id": "\\udc00", "contents": "a"}'),
    "raw-surrogate": rows('{"id": "1", "contents": "\ud800"}'),
    "latin1": lambda path: path.write_bytes(b'{"id": "1", "contents": "\xe9"}\n'),
    "utf16": lambda path: path.write_bytes('{"id": "1", "contents": "a"}\n'.encode("utf-16")),
    "deep": rows('{"id": "1", "contents": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "pretty-printed": text('{\n"id": "1",\n"contents": "a"\n}\n'),
    "one-json-list": text('[{"id": "1", "contents": "a"}]'),
    "csv": text("id,contents\n1,a\n"),
    "gzip": lambda path: path.write_bytes(b"\x1f\x8b\x08\x00" + bytes(range(256))),
    "blank-lines": text("\n\r\n\n"),
    "huge-line": rows('{"id": "1", "contents": "' + "a" * (1 << 24) + '"}'),
    "empty": text(""),
    "missing": Path.unlink,
    "folder": replace_by_folder,
    "unreadable": lambda path: path.chmod(0),
}
CORPUS_KEPT_SIZE = {name: ANY_FILE[name] for name in ("flip-middle", "flip-last", "zeros")}
ORACLES = {
    "garbage": text("}{"),
    "nul": text("\0"),
    "no-question": text('{"documents": []}'),
    "question-number": text('{"question": 1, "documents": []}'),
    "no-documents": text('{"question": "a"}'),
    "documents-text": text('{"question": "a", "documents": "b"}'),
    "document-text": text('{"question": "a", "documents": ["b"]}'),
    "surrogate": text('{"question": "a", "documents": [{"id": "1", "contents": "\\ud800"}]}'),
    "surrogate-question": text('{"question": "\\ud800", "documents": []}'),
    "unknown-id": text('{"question": "a", "ids": ["nobody"]}'),
    "id-nested": text('{"question": "a", "ids": [["d0"]]}'),
    "deep": text("[" * 100_000),
    "latin1": lambda path: path.write_bytes(b'{"question": "\xe9", "ids": []}'),
    "empty": text(""),
    "missing": Path.unlink,
    "folder": replace_by_folder,
    "unreadable": lambda path: path.chmod(0),
}


def some(table: dict[str, Damage], names: str) -> dict[str, Damage]:
    return {name: table[name] for name in names.split()}


def cases() -> Iterator[object]:
    """Yield (backend, file, damage, whether hashes are compared) for every case.

    What one backend reads as another does, it is given a few kinds of.
    """
    by_hash = some(ANY_FILE, "empty first-half flip-middle missing folder unreadable")
    manifest = {name: d for name, d in ANY_FILE.items() if name not in UNNOTICED}
    own = some(CORPORA, "garbage id-twice utf16 missing folder")
    faiss_own = some(FAISS, "garbage dim-huge fewer-rows other-dim infinite other-order")
    tables = [("bm25", name, manifest if "manifest" in name else by_hash, True) for name in BM25]
    tables += [("faiss", name, manifest if "manifest" in name else by_hash, True) for name in DENSE]
    tables += [("bm25", "manifest.json", MANIFESTS, False),
               ("faiss", "manifest.json", DENSE_MANIFESTS, False),
               ("faiss", "vectors.faiss", faiss_own, False),
               ("bare", "vectors.faiss", FAISS | INDEX_TYPES, False),
               ("torch", "vectors.faiss", FAISS | TORCH, False),
               ("random", "corpus.jsonl", CORPORA, False),
               *((backend, "corpus.jsonl", own, False) for backend in ("bm25", "faiss")),
               *((name, "corpus.jsonl", CORPUS_KEPT_SIZE, True) for name in ("bm25", "faiss")),
               ("oracle", "oracle.jsonl", ORACLES, False)]  # fmt: skip
    for backend, file, table, verify in tables:
        for name, damage in table.items():
            label = f"{backend}-{file}-{name}-{verify}"
            yield pytest.param(backend, file, damage, verify, id=label)


@pytest.fixture(scope="module")
def whole() -> Iterator[Path]:
    """A folder with an undamaged corpus and its indexes, readable by all users."""
    folder = Path(tempfile.mkdtemp())
    corpus = str(write_corpus(folder / "corpus.jsonl"))
    (folder / "oracle.jsonl").write_text('{"question": "a", "ids": ["d0"]}\n')
    for method in ("bm25", "hash"):
        flags = ["--retrieval_method", method, "--model_path", "hash", "--corpus_path", corpus]
        assert build([*flags, "--save_dir", str(folder)]) == 0
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def settings(folder: Path, backend: str) -> RetrieverConfig:
    """Return the settings for a backend."""
    corpus, oracle = str(folder / "corpus.jsonl"), DiagnosticConfig(str(folder / "oracle.jsonl"))
    if backend in ("random", "oracle"):
        return RetrieverConfig(backend, corpus, diagnostics=oracle)
    if backend == "bm25":
        return RetrieverConfig(backend, corpus, str(folder / "bm25"))
    index = folder / "hash_Flat.index" / ("vectors.faiss" if backend == "bare" else "")
    engine = TorchConfig("torch" if backend == "torch" else "faiss")
    return RetrieverConfig("hash", corpus, str(index), encoder=EncoderConfig("hash"), torch=engine)


@contextmanager
def as_nobody(path: Path) -> Iterator[None]:
    """Switch from root, who can read any file, to another user if `path` is unreadable."""
    is_hidden = path.is_file() and not path.stat().st_mode & 0o400 and os.geteuid() == 0
    if is_hidden:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_hidden:
            os.seteuid(0)


class Served(Exception):
    """The server was about to listen."""


def status_of(config: RetrieverConfig, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the server's exit status; raises Served when it would start to listen."""

    def serve(*_: object) -> bool:
        raise Served

    options = ServerOptions(port=0, retriever=config)
    monkeypatch.setattr(retrieval_server, "serve", serve)
    monkeypatch.setattr("search_r1.options.parse", lambda *_, **__: options)  # saves 0.1 s
    return command.main([])


@pytest.mark.parametrize(("backend", "name", "damage", "verify"), [*cases()])
def test_damage_is_reported_in_one_line(
    whole: Path,
    backend: str,
    name: str,
    damage: Damage,
    verify: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing damaged or foreign is served, and the user gets one line with the fix."""
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top) / "copy"
        shutil.copytree(whole, folder)
        Path(top).chmod(0o755)
        index = folder / ("bm25" if backend == "bm25" else "hash_Flat.index")
        path = folder / name if name.endswith("jsonl") else index / name
        if not verify:
            values(files={})(index / "manifest.json")  # as in an index of an earlier version
        damage(path)
        config = replace(settings(folder, backend), verify=verify)
        with as_nobody(path):
            assert status_of(config, monkeypatch) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1, errors
    assert "expect" in errors[0] and len(errors[0]) < 1200


@pytest.mark.parametrize("backend", ["bm25", "faiss", "torch", "bare", "random", "oracle"])
def test_undamaged_files_are_served(
    whole: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same settings serve undamaged files, with and without --verify."""
    for verify in (False, True):
        with pytest.raises(Served):
            status_of(replace(settings(whole, backend), verify=verify), monkeypatch)
