"""Interactive conversations: history, commands and ctrl-c."""

import asyncio
import io
import signal
from collections.abc import Iterable, Sequence

import pytest
from rich.console import Console

from search_r1.inference.conversation import Conversation, talk
from search_r1.inference.terminal import Terminal
from tests.fakes import ByteTokenizer, ScriptedEngine
from tests.inference.scripted import SHORT, session
from verl.data.rows import Message
from verl.errors import DataError
from verl.rollout.interface import RolloutEngine
from verl.types import Completion, Sampling

ANSWERS = tuple(f"<answer> {word} </answer>" for word in ("one", "two", "three"))


def converse(
    engine: RolloutEngine, inputs: Iterable[str | type[BaseException]], limit: int = 2000
) -> str:
    """Return the terminal's output for these input lines or exceptions."""
    lines, shown = iter(inputs), io.StringIO()

    def read(_: str) -> str:
        line = next(lines, EOFError)
        if isinstance(line, str):
            return line
        raise line

    terminal = Terminal(Console(file=shown, width=200, highlight=False))
    with asyncio.Runner() as runner:
        talk(Conversation(session(engine, limit=limit)), runner, terminal, read)
    return shown.getvalue()


def prompts(engine: ScriptedEngine) -> list[str]:
    """Return the engine's prompts without their end-of-sequence tokens."""
    return [ByteTokenizer().decode(request.prompt_ids) for request in engine.requests]


def test_a_follow_up_sees_what_was_said_until_it_is_forgotten() -> None:
    """A follow-up's prompt contains the earlier questions and answers, until /new drops them."""
    engine = ScriptedEngine(ANSWERS)
    shown = converse(engine, ["First?", "", "Second?", "/new", "Third?", "/quit", "never"])
    worded = [SHORT.user_prompt(q) for q in ("First?", "Second?", "Third?")]
    assert prompts(engine) == [worded[0], f"First?\none\n{worded[1]}", worded[2]]
    assert [f"Answer: {a}" in shown for a in ("one", "two", "three")] == [True] * 3


def test_a_prompt_that_is_refused_for_another_reason_forgets_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as one that the chat template rejects: a shorter history would not help."""
    talking = Conversation(session(ScriptedEngine(ANSWERS)))
    terminal = Terminal(Console(file=io.StringIO()))
    asyncio.run(talking.ask("First?", terminal))

    def refuse(self: object, question: str, earlier: Sequence[Message]) -> None:
        assert len(earlier) == 2
        raise DataError("no such role")

    monkeypatch.setattr(type(talking.session), "prompt", refuse)
    with pytest.raises(DataError, match="no such role"):
        asyncio.run(talking.ask("Second?", terminal))


def test_the_oldest_turns_make_room() -> None:
    """If the history does not fit, the oldest questions are dropped first."""
    engine = ScriptedEngine(ANSWERS)
    limit = len(SHORT.user_prompt("Third?")) + len("Second?\ntwo\n") + 1
    converse(engine, ["First?", "Second?", "Third?"], limit)
    assert prompts(engine)[-1] == f"Second?\ntwo\n{SHORT.user_prompt('Third?')}"
    assert "at most 20; fix:" in converse(ScriptedEngine([]), ["First?"], 20)


def test_an_unknown_command_is_helped_and_asks_nothing() -> None:
    """Unknown commands, and ctrl-c at the prompt, print the help."""
    engine = ScriptedEngine([])
    assert converse(engine, ["/help", KeyboardInterrupt]).count("/quit ends") == 3
    assert engine.requests == []


class Interrupted(ScriptedEngine):
    """An engine during whose second, endless turn the user presses ctrl-c."""

    was_cancelled = False

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        if len(self.requests) == 1 and not self.was_cancelled:
            signal.raise_signal(signal.SIGINT)
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.was_cancelled = True
                raise
        return await super().generate(prompt_ids, sampling)


def test_ctrl_c_stops_a_turn_and_not_the_program() -> None:
    """Ctrl-c cancels the current answer, and its question is not part of the conversation."""
    engine = Interrupted(ANSWERS)
    shown = converse(engine, ["First?", "Stopped?", "Second?"])
    assert engine.was_cancelled
    assert "stopped" in shown
    assert prompts(engine)[1] == f"First?\none\n{SHORT.user_prompt('Second?')}"
    assert "Answer: two" in shown
