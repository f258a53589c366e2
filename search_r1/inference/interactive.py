"""A conversation: each question sees the ones before it, and ctrl-c ends a turn only."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from search_r1.inference.dialogue import AgentSession, Reply, past
from search_r1.inference.opening import opened
from search_r1.inference.options import AgentOptions
from search_r1.inference.terminal import Terminal
from verl.data.rows import Message
from verl.errors import DataError, UserError
from verl.types import Prompt

HELP = "/new forgets the conversation, /quit ends; ctrl-c stops an answer"
INPUT = "> "


@dataclass
class Conversation:
    """What was asked and answered so far."""

    session: AgentSession
    _past: list[tuple[Message, Message]] = field(default_factory=list)

    async def ask(self, question: str, terminal: Terminal) -> Reply:
        """Play one turn, and remember it if it has an answer."""
        reply = await self.session.ask(question, self._prompt(question), terminal)
        if reply.answer is not None:
            self._past.append(past(question, reply.answer))
        return reply

    def forget(self) -> None:
        """Start anew."""
        self._past.clear()

    def _prompt(self, question: str) -> Prompt:
        """The question after as many earlier turns as fit; the oldest go first, for good."""
        while True:
            try:
                return self.session.prompt(question, [m for turn in self._past for m in turn])
            except DataError:
                if not self._past:
                    raise
                del self._past[0]


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
