"""Ask a search agent one question, a conversation (`--interactive`), or a file (`--file`).

The agent loop is that of training. The dialogue streams, documents are folded to their titles, and
the answer comes last with its sources; `--json` prints one object for scripts instead. A mistake
of the user ends in one message and exit code 2. See docs/inference.md.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

from search_r1.inference.options import InferenceOptions
from search_r1.options import run
from verl.errors import explain

QUESTION = "What is the capital of China?"


@dataclass(frozen=True, kw_only=True)
class InferOptions(InferenceOptions):
    """What is asked, of which agent, and how the answer is shown."""

    question: tyro.conf.Positional[str | None] = None
    """what is asked; default: a question for a first try"""
    interactive: bool = False
    """a conversation: follow-up questions see what was said"""
    file: Path | None = None
    """text, one question a line, or rows as parquet or jsonl"""
    out: Path | None = None
    """jsonl of the answers to --file; default: standard output"""
    json: bool = False
    """print one JSON object only"""
    show_documents: bool = False
    """print what searches find in full"""

    def conflicts(self) -> Iterator[str]:
        """Those of the agent, and flags that exclude each other."""
        yield from super().conflicts()
        asked = {"a question": self.question is not None, "--interactive": self.interactive,
                 "--file": self.file is not None}  # fmt: skip
        given = [name for name, is_given in asked.items() if is_given]
        if len(given) > 1:
            yield explain("question", " and ".join(given), "one of them", "leave the others out")
        if self.json and (self.interactive or self.show_documents):
            other = "--interactive" if self.interactive else "--show-documents"
            yield explain("--json", f"--json and {other}", "one of them", f"leave {other} out")
        if self.show_documents and self.file is not None:
            fix = "leave it out: the answers to a file are JSON, with ids and titles"
            yield explain("--show-documents", "--file beside it", "a dialogue that is shown", fix)
        if self.question is not None and not self.question.strip():
            yield explain("question", "an empty one", "words", "write it in quotes")
        if self.out and self.file and _is_same(self.out, self.file):
            yield explain("--out", "the file of --file", "another one", "name a new file")
        if self.out is not None and self.file is None:
            yield explain("--out", "no --file", "a file whose answers it receives", "give both")


def _is_same(one: Path, other: Path) -> bool:
    """Whether two paths name one file, by links too."""
    try:
        return one.samefile(other)
    except OSError:  # one of them is not there yet
        return os.path.realpath(one) == os.path.realpath(other)


main = partial(run, "search_r1.inference.command:answer", InferOptions, prog="search-r1 infer",
               description=__doc__)  # fmt: skip
