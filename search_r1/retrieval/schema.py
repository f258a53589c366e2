"""The wire contract of the retriever: documents, hits, and how a client reads a response."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

TOKEN_VARIABLE = "RETRIEVER_TOKEN"
"""Environment variable with the bearer token, for server and clients."""

IDS = ("id", "_id", "docid", "doc_id", "pid", "passage_id")
"""Names of a document's id; the first that is not null is used."""
TEXTS = ("text", "passage", "passage_text", "content", "body", "snippet")
"""Names of a document's text without its title, where it has no `contents`."""


@dataclass(frozen=True, slots=True)
class Document:
    """A passage; `contents` is `"Title"`, a newline and the text, as in wiki-18."""

    id: str
    title: str
    text: str
    contents: str

    @classmethod
    def from_contents(cls, id: str, contents: str) -> "Document":
        """Split `contents` into title and text; if it is a single line, there is no title."""
        head, newline, rest = contents.partition("\n")
        title, text = (_unquote(head), rest) if newline else ("", contents)
        return cls(id, title, text, contents)

    @classmethod
    def from_title(cls, id: str, title: str, text: str) -> "Document":
        """Build `contents` from title and text."""
        return cls(id, title, text, f'"{title}"\n{text}')

    @classmethod
    def from_mapping(cls, row: Mapping[str, Any], default_id: str | None = None) -> "Document":
        """Parse a row with `contents`, or a text and perhaps a title, or all.

        Names that other servers and corpora use are accepted (`IDS`, `TEXTS`). A row without an id
        gets `default_id`, or a hash of its contents. Raises KeyError or TypeError.
        """
        if not isinstance(row, dict | Mapping):  # the ABC's check of a dictionary is slow
            raise TypeError(f"the document is {type(row).__name__}, expected an object")
        id = _id(row, default_id)
        if row.get("contents") is None:
            text = _text(row, next((name for name in TEXTS if row.get(name) is not None), "text"))
            title = "" if row.get("title") is None else _text(row, "title")
            contents = f'"{title}"\n{text}' if title else text
            return cls(_content_id(contents) if id is None else id, title, text, contents)
        contents = _text(row, "contents")
        id = _content_id(contents) if id is None else id
        if row.get("title") is None or row.get("text") is None:
            split = cls.from_contents(id, contents)
            title = split.title if row.get("title") is None else _text(row, "title")
            text = split.text if row.get("text") is None else _text(row, "text")
            return cls(id, title, text, contents)
        return cls(id, _text(row, "title"), _text(row, "text"), contents)

    def to_row(self) -> dict[str, str]:
        """Return the row of a corpus: id and contents, and what does not follow from them."""
        row = {"id": self.id, "contents": self.contents}
        if self != Document.from_contents(**row):
            row |= {"title": self.title, "text": self.text}
        return row

    def well_formed(self) -> "Document":
        """Return a copy with lone surrogates, which break tokenizers, replaced by `?`."""
        return Document(*map(well_formed, astuple(self)))


@dataclass(frozen=True, slots=True)
class Hit:
    """A retrieved document and its score; higher is better."""

    document: Document
    score: float


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Return a 64-bit BLAKE2b hash (hex) of a backend's `info()`: the key of caches and records."""
    text = json.dumps(facts, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def well_formed(text: str) -> str:
    """Return `text` with lone surrogates, which break encoders and tokenizers, replaced by `?`."""
    return text.encode("utf-8", "replace").decode()


def from_wire(response: Mapping[str, Any]) -> list[list[Document]]:
    """Parse the documents of a response, with or without scores; raises KeyError or TypeError."""
    return [[_from_item(item) for item in items] for items in response["result"]]


def _from_item(item: Any) -> Document:
    """Parse a document with or without its score; of some servers it is a plain text."""
    document = item.get("document", item) if isinstance(item, dict) else item
    if isinstance(document, str):
        others = item if isinstance(item, dict) else {}
        document = {"id": others.get("id"), "title": others.get("title"), "contents": document}
    return Document.from_mapping(document)


def _id(row: Mapping[str, Any], default: str | None) -> str | None:
    id = row.get("id")
    if id is None:
        id = next((row[name] for name in IDS if row.get(name) is not None), default)
    # Pandas makes floats of integers next to a null; larger floats have lost digits.
    if isinstance(id, float) and id.is_integer() and abs(id) < 1 << 53:
        id = int(id)
    if isinstance(id, bool) or not isinstance(id, str | int | None):
        raise TypeError(f"id is {type(id).__name__}, expected text or an integer")
    return None if id is None else str(id)


def _content_id(contents: str) -> str:
    """Return an id that equal contents have in common."""
    return hashlib.blake2b(contents.encode("utf-8", "replace"), digest_size=8).hexdigest()


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is {type(value).__name__}, expected text")
    return value


def _unquote(line: str) -> str:
    line = line.strip()
    return line[1:-1] if len(line) >= 2 and line[0] == line[-1] == '"' else line
