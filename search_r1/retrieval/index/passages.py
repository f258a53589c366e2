"""Makes a corpus from a folder of texts, which are split into passages at sentence ends.

The id of a passage is the path of its file within the folder and its number in that file, so that
changing or adding a file changes no id of another file. Words are separated by white space.
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from search_r1.retrieval.errors import CorpusError
from search_r1.retrieval.schema import Document
from verl.files import atomic_write

logger = logging.getLogger(__name__)

SUFFIXES = (".txt", ".md")

_HEADING = re.compile(r"\s*#{1,6}\s+(?P<title>\S.*)")
_PARAGRAPH_END = re.compile(r"\n\s*\n")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def read_folder(folder: Path, max_words: int) -> Iterator[Document]:
    """Yield the passages of all texts in a folder and its subfolders, sorted by path.

    Raises CorpusError for a folder without texts, and for files that are not UTF-8 (names all).
    """
    if max_words < 1:
        raise CorpusError(
            f"passages of {max_words} words; expected 1 or more: give --max_words 100"
        )
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix.lower() in SUFFIXES)
    if not files:
        raise CorpusError(
            f"{folder} has no {' or '.join(SUFFIXES)} file; expected a folder of texts: "
            "correct the path, or save the texts as .txt in UTF-8"
        )
    texts = _read_texts(files)
    for path, text in texts.items():
        name = path.relative_to(folder).as_posix()
        passages = list(split_file(name, text, max_words))
        if not passages:
            logger.warning("%s has no text: skipped", path)
        yield from passages


def split_file(name: str, text: str, max_words: int) -> Iterator[Document]:
    """Yield the passages of one file; their title is its first line if a heading, else its name."""
    heading = _HEADING.match(text)
    title = _without_closing(heading["title"]) if heading else ""
    body = text[heading.end() :] if heading else text
    title = title or re.sub(r"[_\s]+", " ", Path(name).stem).strip()
    for number, passage in enumerate(split_text(body, max_words)):
        yield Document.from_title(f"{name}#{number}", title, passage)


def _without_closing(title: str) -> str:
    """Remove the optional end of a Markdown heading, as in `# Title #`, but not the # of `C#`."""
    title = title.rstrip()
    start = title.rstrip("#")
    return title if start and not start[-1].isspace() else start.rstrip()


def split_text(text: str, max_words: int) -> list[str]:
    """Split into passages of whole sentences up to `max_words`; splits only longer sentences."""
    passages: list[list[str]] = []
    for sentence in _sentences(text):
        for start in range(0, len(sentence), max_words):
            part = sentence[start : start + max_words]
            if passages and len(passages[-1]) + len(part) <= max_words:
                passages[-1] += part
            else:
                passages.append(part)
    return [" ".join(words) for words in passages]


def write_corpus(documents: Iterable[Document], path: Path) -> int:
    """Write jsonl rows (`id`, `contents`) and return their number; raises CorpusError for none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with atomic_write(path) as part, part.open("w", encoding="utf-8", newline="\n") as file:
        for document in documents:
            row = {"id": document.id, "contents": document.contents}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
        if not count:
            raise CorpusError(f"{path}: no passages; expected texts with words: give other texts")
    return count


def _read_texts(files: list[Path]) -> dict[Path, str]:
    texts, bad = {}, []
    for path in files:
        try:
            texts[path] = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            bad.append(f"{path} (byte {error.start})")
    if bad:
        raise CorpusError(
            f"not UTF-8: {', '.join(bad)}; expected texts in UTF-8: convert them, "
            "for example with iconv -f latin1 -t utf-8"
        )
    return texts


def _sentences(text: str) -> Iterator[list[str]]:
    """Yield the words of each sentence; the end of a paragraph ends a sentence too."""
    for paragraph in _PARAGRAPH_END.split(text):
        for sentence in _SENTENCE_END.split(paragraph):
            if words := sentence.split():
                yield words
