"""The wire contract of `POST /retrieve`: requests, documents, hits, and how they are written.

Both sides use these types: the server writes hits, the client reads them. Nothing here searches.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import orjson
from pydantic import BaseModel

TOKEN_VARIABLE = "RETRIEVER_TOKEN"
"""The environment variable with the bearer token of server and clients."""


@dataclass(frozen=True, slots=True)
class Document:
    """A passage: `contents` is `"Title"`, a newline and the text, as in wiki-18."""

    id: str
    title: str
    text: str
    contents: str

    @classmethod
    def from_contents(cls, id: str, contents: str) -> "Document":
        """Split title and text out of `contents`; without a first line there is no title."""
        head, newline, rest = contents.partition("\n")
        title, text = (_unquote(head), rest) if newline else ("", contents)
        return cls(id, title, text, contents)

    @classmethod
    def from_title(cls, id: str, title: str, text: str) -> "Document":
        """Join `contents` from title and text."""
        return cls(id, title, text, f'"{title}"\n{text}')

    @classmethod
    def from_mapping(cls, row: Mapping[str, Any]) -> "Document":
        """Read contents, or title and text, or all; raises KeyError or TypeError."""
        id = row["id"]
        if isinstance(id, bool) or not isinstance(id, str | int):
            raise TypeError(f"id is {type(id).__name__}, expected text or an integer")
        if "contents" not in row:
            return cls.from_title(str(id), _text(row, "title"), _text(row, "text"))
        document = cls.from_contents(str(id), _text(row, "contents"))
        if "title" not in row and "text" not in row:
            return document
        title = document.title if row.get("title") is None else _text(row, "title")
        text = document.text if row.get("text") is None else _text(row, "text")
        return cls(document.id, title, text, document.contents)

    def well_formed(self) -> "Document":
        """Itself without lone surrogates, which no tokenizer takes."""
        return Document(*map(well_formed, astuple(self)))


@dataclass(frozen=True, slots=True)
class Hit:
    """A document that was found and how well it fits; a higher score fits better."""

    document: Document
    score: float


Written = tuple[bytes, ...]
"""Hits in JSON, without BEGIN and END. Bytes are nothing to the garbage collector, which would go
through the objects of a hundred thousand hits for a second, with all clients waiting."""
BEGIN, SCORE, END = b'{"document":', b',"score":', b"}"


def well_formed(text: str) -> str:
    """`text` with lone surrogates, which no encoder or tokenizer takes, replaced by `?`."""
    return text.encode("utf-8", "replace").decode()


class RetrieveResponse(BaseModel):
    """The answer: one list per query, best first, in the order of the queries."""

    result: list[list[Hit | Document]]


class DocumentResponse(BaseModel):
    """The answer to `GET /document`."""

    document: dict[str, str]


class Health(BaseModel):
    """The answer of `GET /health`: given only when searches can be answered."""

    status: str
    retriever: str
    num_documents: int


def written(hits: Sequence[Hit]) -> Written:
    """Each hit as JSON in UTF-8, as it is sent with its score; a lone surrogate becomes `?`."""
    return tuple(_written(hit)[len(BEGIN) : -len(END)] for hit in hits)


def _written(hit: Hit) -> bytes:
    try:
        return orjson.dumps(hit)
    except orjson.JSONEncodeError:
        text = json.dumps(asdict(hit), ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


def json_parts(found: Sequence[Written], return_scores: bool, num_queries: int) -> Iterator[bytes]:
    """The answer in JSON, of the results of each query, in parts of so many queries each."""
    row_of = _with_scores if return_scores else _without_scores
    yield b'{"result":['
    for start in range(0, len(found), num_queries):
        part = b",".join(map(row_of, found[start : start + num_queries]))
        yield b"," + part if start else part
    yield b"]}"


def _with_scores(hits: Written) -> bytes:
    return b"[%b%b%b]" % (BEGIN, (END + b"," + BEGIN).join(hits), END) if hits else b"[]"


def _without_scores(hits: Written) -> bytes:
    return b"[%b]" % b",".join([hit[: hit.rindex(SCORE)] for hit in hits])


def from_wire(answer: Mapping[str, Any]) -> list[list[Document]]:
    """The documents of an answer, with or without scores; raises KeyError or TypeError."""
    return [
        [Document.from_mapping(item.get("document", item)) for item in found]
        for found in answer["result"]
    ]


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is {type(value).__name__}, expected text")
    return value


def _unquote(line: str) -> str:
    """`line` without the pair of double quotes around it."""
    line = line.strip()
    is_quoted = len(line) >= 2 and line[0] == line[-1] == '"'
    return line[1:-1] if is_quoted else line
