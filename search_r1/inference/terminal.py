"""Shows a dialogue on a terminal: streamed text, then the answer with its sources."""

from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from search_r1.inference.dialogue import DialogueListener, Reply, Search
from search_r1.plain import escape_controls
from search_r1.retrieval.schema import Document
from verl.types import Status

POLICY = "cyan"
FOUND = "yellow"
ASIDE = "dim"


@dataclass
class Terminal(DialogueListener):
    """Prints dialogues to a console."""

    console: Console
    shows_documents: bool = False
    """Print the text of documents, not just their titles."""
    _num_searches: int = 0
    _is_in_line: bool = False

    def said(self, text: str) -> None:
        self.console.print(Text(escape_controls(text), style=POLICY), end="", soft_wrap=True)
        self._is_in_line = not text.endswith("\n") if text else self._is_in_line

    def searched(self, search: Search) -> None:
        """Print a line per document, and its text if `shows_documents`."""
        self._num_searches += 1
        count = len(search.documents)
        found = "1 document" if count == 1 else f"{count} documents"
        self._line(Text(f"  search {self._num_searches}: {found}", style=ASIDE))
        for document in search.documents:
            self._line(Text(f"    {label(document)}", style=FOUND))
            if self.shows_documents:
                self._line(Text(f"      {document.text.strip()}"))

    def corrected(self, text: str) -> None:
        """Print the feedback, which is part of the dialogue."""
        self._line(Text(text.strip(), style=ASIDE))

    def conclude(self, reply: Reply) -> None:
        """Print the answer, or why there is none, and the sources."""
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
        """Print that the user stopped the answer."""
        self._line(Text("stopped", style="bold red"))
        self._num_searches = 0

    def note(self, text: str) -> None:
        self._line(Text(text, style=ASIDE))

    def _line(self, text: Text) -> None:
        if self._is_in_line:
            self.console.print()
            self._is_in_line = False
        text.plain = escape_controls(text.plain)
        self.console.print(text, soft_wrap=True)


def label(document: Document) -> str:
    return f"{document.title or 'untitled'} [{document.id}]".replace("\n", " ")
