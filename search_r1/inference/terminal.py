"""A dialogue on a terminal: words as they come, documents folded, the answer with its sources."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from search_r1.inference.dialogue import DialogueListener, Reply, Search
from search_r1.plain import shown
from search_r1.search.schema import Document
from verl.types import Status

POLICY = "cyan"
FOUND = "yellow"
ASIDE = "dim"


@dataclass
class Terminal(DialogueListener):
    """Shows one dialogue after the other."""

    console: Console
    shows_documents: bool = False
    """Print the text of documents, not just their titles."""
    _num_searches: int = 0
    _is_in_line: bool = False

    def said(self, text: str) -> None:
        """Print it as it is."""
        self.console.print(Text(shown(text), style=POLICY), end="", soft_wrap=True)
        self._is_in_line = not text.endswith("\n") if text else self._is_in_line

    def searched(self, search: Search) -> None:
        """One line a document, or its text too."""
        self._num_searches += 1
        count = len(search.documents)
        found = "1 document" if count == 1 else f"{count} documents"
        self._line(Text(f"  search {self._num_searches}: {found}", style=ASIDE))
        for document in search.documents:
            self._line(Text(f"    {label(document)}", style=FOUND))
            if self.shows_documents:
                self._line(Text(f"      {document.text.strip()}"))

    def corrected(self, text: str) -> None:
        """What the policy is told stands in the dialogue like its own words."""
        self._line(Text(text.strip(), style=ASIDE))

    def conclude(self, reply: Reply) -> None:
        """The answer, or why there is none, and where it comes from."""
        self._line(Text())
        if reply.answer is not None:
            self._line(Text(f"Answer: {reply.answer}", style="bold green"))
        elif reply.status is Status.FAILED:
            self._line(Text(f"no answer (failed): {reply.error}", style="bold red"))
        else:
            self._line(Text(f"no answer ({reply.status.value})", style="bold red"))
        if reply.sources:
            self._line(Text("Sources", style=ASIDE))
        for source in reply.sources:
            numbers = ", ".join(map(str, source.searches))
            plural = "search" if len(source.searches) == 1 else "searches"
            self._line(Text(f"  {label(source.document)} ({plural} {numbers})", style=FOUND))
        self._num_searches = 0

    def stopped(self) -> None:
        """The turn was ended by the user."""
        self._line(Text("stopped", style="bold red"))
        self._num_searches = 0

    def note(self, text: str) -> None:
        """A line about the program itself."""
        self._line(Text(text, style=ASIDE))

    def _line(self, text: Text) -> None:
        """Print on a line of its own."""
        if self._is_in_line:
            self.console.print()
            self._is_in_line = False
        text.plain = shown(text.plain)
        self.console.print(text, soft_wrap=True)


def label(document: Document) -> str:
    """A document's title and id."""
    return f"{document.title or 'untitled'} [{document.id}]".replace("\n", " ")
