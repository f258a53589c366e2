"""A conversation: each question sees the earlier ones; ctrl-c stops the current answer only."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from search_r1.inference.agent_options import AgentOptions
from search_r1.inference.dialogue import AgentSession, Reply, as_messages
from search_r1.inference.opening import open_session
from search_r1.inference.terminal import Terminal
from verl.data.rows import Message
from verl.errors import PromptTooLong, UserError

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
            except PromptTooLong:  # drop the oldest question and answer
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
