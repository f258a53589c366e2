"""Ask a search agent one question, hold a conversation (`--interactive`), or answer a `--file`.

The agent loop is that of training. The dialogue is streamed with documents shown by title, and the
answer comes last with its sources; `--json` prints one object for scripts instead. User errors end
with one message and exit code 2. See docs/guides/inference.md.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

from search_r1.inference.agent_options import COMMON, InferenceOptions
from search_r1.options import run
from verl.errors import explain

QUESTION = "What is the capital of China?"


@dataclass(frozen=True, kw_only=True)
class InferOptions(InferenceOptions):
    """The question, the agent, and how the answer is shown."""

    COMMON = ("question", "interactive", "file", "out", "json", "show_documents", *COMMON)

    question: tyro.conf.Positional[str | None] = None
    """the question; default: an example question"""
    interactive: bool = False
    """start a conversation, in which follow-up questions see the earlier ones"""
    file: Path | None = None
    """text with one question per line, or rows as parquet or jsonl"""
    out: Path | None = None
    """jsonl file for the answers to --file; default: standard output"""
    json: bool = False
    """print one JSON object only"""
    show_documents: bool = False
    """print the full text of found documents"""

    def conflicts(self) -> Iterator[str]:
        """Yield problems of the agent's options, and flags that exclude each other."""
        yield from super().conflicts()
        sources = {"a question": self.question is not None, "--interactive": self.interactive,
                   "--file": self.file is not None}  # fmt: skip
        used = [name for name, is_used in sources.items() if is_used]
        if len(used) > 1:
            yield explain("question", " and ".join(used), "one of them", "leave the others out")
        if self.json and (self.interactive or self.show_documents):
            other = "--interactive" if self.interactive else "--show-documents"
            yield explain("--json", f"--json and {other}", "one of them", f"leave {other} out")
        if self.show_documents and self.file is not None:
            fix = "leave it out: the answers to a file are JSON, with ids and titles"
            got, expected = "--file as well", "a dialogue on the terminal"
            yield explain("--show-documents", got, expected, fix)
        if self.question is not None and not self.question.strip():
            yield explain("question", "an empty text", "words", "write it in quotes")
        if self.out and self.file and _is_same(self.out, self.file):
            yield explain("--out", "the file of --file", "another file", "name a new file")
        if self.out is not None and self.file is None:
            yield explain("--out", "no --file", "a file of questions to answer", "give both")


def _is_same(first: Path, second: Path) -> bool:
    """Whether two paths name the same file, also through links."""
    try:
        return first.samefile(second)
    except OSError:  # one of them does not exist yet
        return os.path.realpath(first) == os.path.realpath(second)


main = partial(run, "search_r1.inference.command:answer", InferOptions, prog="search-r1 infer",
               description=__doc__)  # fmt: skip
