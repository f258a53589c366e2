"""A dialogue on a terminal, or a conversation: words as they come, the answer with its sources.

Each question of a conversation sees the ones before it, and ctrl-c ends a turn only.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from search_r1.inference.dialogue import AgentSession, DialogueListener, Reply, Search, past
from search_r1.inference.opening import opened
from search_r1.inference.options import AgentOptions
from search_r1.plain import shown
from search_r1.search.schema import Document
from verl.data.rows import Message
from verl.errors import DataError, UserError
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
        self._line(Text(text, style=ASIDE))

    def _line(self, text: Text) -> None:
        if self._is_in_line:
            self.console.print()
            self._is_in_line = False
        text.plain = shown(text.plain)
        self.console.print(text, soft_wrap=True)


def label(document: Document) -> str:
    return f"{document.title or 'untitled'} [{document.id}]".replace("\n", " ")


HELP = "/new forgets the conversation, /quit ends; ctrl-c stops an answer"
INPUT = "> "


@dataclass
class Conversation:
    """What was asked and answered so far."""

    session: AgentSession
    _past: list[tuple[Message, Message]] = field(default_factory=list)

    async def ask(self, question: str, terminal: Terminal) -> Reply:
        """Play one turn after as many earlier ones as fit; remember it if it has an answer."""
        while True:
            try:
                prompt = self.session.prompt(question, [m for turn in self._past for m in turn])
                break
            except DataError:
                if not self._past:
                    raise
                del self._past[0]  # for good
        reply = await self.session.ask(question, prompt, terminal)
        if reply.answer is not None:
            self._past.append(past(question, reply.answer))
        return reply

    def forget(self) -> None:
        self._past.clear()


def converse(options: AgentOptions, terminal: Terminal, read: Callable[[str], str] = input) -> None:
    """Open the agent and talk until the user ends it. Raises UserError at the opening."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        with _unheard_interrupts():
            session = runner.run(stack.enter_async_context(opened(options)))
        try:
            talk(Conversation(session), runner, terminal, read)
        finally:
            runner.run(stack.aclose())


def talk(
    conversation: Conversation,
    runner: asyncio.Runner,
    terminal: Terminal,
    read: Callable[[str], str],
) -> None:
    """Read questions and answer them until /quit or the end of input."""
    terminal.note(HELP)
    while True:
        try:
            words = read(INPUT).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            terminal.note(HELP)
            continue
        if words == "/quit":
            return
        if words == "/new":
            conversation.forget()
            terminal.note("a new conversation")
        elif words.startswith("/"):
            terminal.note(HELP)
        elif words:
            _turn(conversation, runner, terminal, words)


def _turn(
    conversation: Conversation, runner: asyncio.Runner, terminal: Terminal, question: str
) -> None:
    """One question; an interrupt or a failure ends no more than it."""
    try:
        terminal.conclude(runner.run(conversation.ask(question, terminal)))
    except KeyboardInterrupt:
        terminal.stopped()
    except UserError as error:
        terminal.note(str(error))


@contextlib.contextmanager
def _unheard_interrupts() -> Iterator[None]:
    """Processes that start here never hear ctrl-c, which would end vLLM's with the turn."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
