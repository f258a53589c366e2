"""Shows a dialogue, or a conversation of several, on a terminal: streamed text, then the answer.

Each question of a conversation sees the earlier ones; ctrl-c stops the current answer only.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from search_r1.inference.agent_options import AgentOptions
from search_r1.inference.dialogue import AgentSession, DialogueListener, Reply, Search, as_messages
from search_r1.inference.opening import open_session
from search_r1.plain import escape_controls
from search_r1.retrieval.schema import Document
from verl.data.rows import Message
from verl.errors import DataError, UserError
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


HELP = "/new forgets the conversation, /quit ends; ctrl-c stops an answer"
INPUT = "> "


@dataclass
class Conversation:
    """A conversation with its earlier questions and answers."""

    session: AgentSession
    _history: list[tuple[Message, Message]] = field(default_factory=list)

    async def ask(self, question: str, terminal: Terminal) -> Reply:
        """Ask a question after as many earlier ones as fit; remember it if it is answered."""
        while True:
            try:
                earlier = [message for pair in self._history for message in pair]
                prompt = self.session.prompt(question, earlier)
                break
            except DataError:  # too long: drop the oldest question and answer
                if not self._history:
                    raise
                del self._history[0]
        reply = await self.session.ask(question, prompt, terminal)
        if reply.answer is not None:
            self._history.append(as_messages(question, reply.answer))
        return reply

    def forget(self) -> None:
        self._history.clear()


def converse(options: AgentOptions, terminal: Terminal, read: Callable[[str], str] = input) -> None:
    """Start the agent and answer questions until the user quits. Raises UserError at the start."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        with _block_interrupts():
            session = runner.run(stack.enter_async_context(open_session(options)))
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
            line = read(INPUT).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            terminal.note(HELP)
            continue
        if line == "/quit":
            return
        if line == "/new":
            conversation.forget()
            terminal.note("a new conversation")
        elif line.startswith("/"):
            terminal.note(HELP)
        elif line:
            _answer(conversation, runner, terminal, line)


def _answer(
    conversation: Conversation, runner: asyncio.Runner, terminal: Terminal, question: str
) -> None:
    """Answer one question; an interrupt or an error ends this answer only."""
    try:
        terminal.conclude(runner.run(conversation.ask(question, terminal)))
    except KeyboardInterrupt:
        terminal.stopped()
    except UserError as error:
        terminal.note(str(error))


@contextlib.contextmanager
def _block_interrupts() -> Iterator[None]:
    """Block SIGINT while starting processes, which inherit it: ctrl-c must not end vLLM's."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
