"""One recorded dialogue played again: the loop of the run, with its past told instead of made.

What the policy said before the turn in question comes from the record, and so does what tools
brought, wherever the same was asked in this trajectory or another of the run. The rest is sampled,
with the seeds of the recorded turns.
"""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.agent.dialogue import DialogueAgent
from verl.agent.interface import DialogueFormat, Item, Turn
from verl.data.trajectories import parse_row, recorded_steps, step_path
from verl.engine import RolloutEngine, cut_at_stop
from verl.errors import DataError, ToolError, explain
from verl.rollout.replica import Decode, PartialTurn
from verl.types import Completion, Origin, Sampling, Segment, Status, Trajectory, start_trajectory

Said = tuple[Segment, Segment | None]
"""A policy turn, and what the environment answered; nothing after the last one."""
Find = Callable[[Turn], Segment | None]
"""Looks for what calls brought in other trajectories of the run."""


@dataclass(frozen=True)
class Edit:
    """What is changed of a trajectory; nothing replays it as it was."""

    turn: int = 1
    """The policy's turn, counted from 1."""
    query: str | None = None
    """Asked instead of the turn's call."""
    text: str | None = None
    """Said instead of the turn; the policy goes on from it unless it ends a turn."""
    documents: Sequence[Sequence[Item]] | None = None
    """What each call of the turn brings instead."""

    @property
    def changes(self) -> list[str]:
        """What is edited, by name."""
        return [n for n in ("query", "text", "documents") if getattr(self, n) is not None]


def turns_of(trajectory: Trajectory) -> list[Said]:
    """The policy's turns in order, each with what followed it."""
    after = [*trajectory.segments[1:], None]
    return [
        (one, then if then is not None and then.origin is Origin.OBSERVATION else None)
        for one, then in zip(trajectory.segments, after, strict=True)
        if one.origin is Origin.POLICY
    ]


@dataclass(frozen=True)
class ReplayAgent(DialogueAgent):
    """The run's agent; its tools are asked only for what was never recorded."""

    recorded: Trajectory = field(kw_only=True)
    edit: Edit = field(kw_only=True)
    find: Find = field(kw_only=True)

    async def _respond(self, trajectory: Trajectory, turn: Turn, acts: bool) -> Segment:
        """What was recorded, was put in its place, or is asked for now."""
        turns, documents = turns_of(self.recorded), self.edit.documents
        number = len(turns_of(trajectory)) - 1
        if number < self.edit.turn - 1 and (brought := turns[number][1]) is not None:
            return brought
        if number == self.edit.turn - 1 and documents is not None:
            if len(turn.calls) != len(documents):
                got = f"documents for {len(documents)} calls"
                expected = f"those of the {len(turn.calls)} that turn {number + 1} makes"
                raise DataError(explain("documents", got, expected, "name a turn that searches"))
            return self._encoded_segment(
                Origin.OBSERVATION, self._response_text(turn, self.fit(turn, documents))
            )
        is_same = self.recorded.status is Status.OUT_OF_BUDGET
        if acts and is_same and trajectory.ids == self.recorded.ids:
            # What was too long then, and so was not recorded, is too long now.
            return Segment(Origin.OBSERVATION, (0,) * (self.limits.max_prompt_length + 1))
        known = acts and (
            brought_by(turn, [*turns[number:], *turns[:number]], self.format) or self.find(turn)
        )
        try:
            return known or await super()._respond(trajectory, turn, acts)
        except ToolError as error:
            asked = "; ".join(f"{call.tool} {call.arguments}" for call in turn.calls)
            others = "or name another by --retriever-url, or edit the documents"
            text = f"{asked} was never recorded, and {error}; {others}"
            raise ToolError(text, error.faults) from error


@dataclass
class ReplayEngine(RolloutEngine):
    """Tells the turns that were said, begins the next one as it is told, and samples the rest."""

    engine: RolloutEngine
    said: Sequence[Completion]
    opening: Completion | None
    """What the turn after those begins with."""
    decode: Decode
    num_turns: int = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        number, self.num_turns = self.num_turns, self.num_turns + 1
        if number < len(self.said):
            return self.said[number]
        opening = self.opening
        if number > len(self.said) or opening is None:
            return await self.engine.generate(prompt_ids, sampling)
        if opening.finish_reason == "stop":
            return opening
        if len(opening.ids) >= sampling.max_tokens:
            got, fix = f"{len(opening.ids)} tokens that end no turn", "shorten it"
            expected = f"less than {sampling.max_tokens}, as data.max_response_length says"
            raise DataError(explain("the edited text", got, expected, fix))
        turn = PartialTurn(prompt_ids, sampling, self.decode, [opening], opening.text)
        whole = await turn.resume(self.engine.generate)
        assert whole is not None, "nothing interrupts a replay"
        return whole


async def play(
    agent: DialogueAgent, engine: RolloutEngine, recorded: Trajectory, edit: Edit,
    sampling: Sampling, version: int, find: Find = lambda turn: None,
) -> Trajectory:  # fmt: skip
    """The trajectory played again from the edit's turn on. Raises DataError for no such turn."""
    turns, tokenizer = turns_of(recorded), agent.tokenizer
    if edit.turn > len(turns):
        fix, expected = f"--turn {len(turns)}", f"one of the {len(turns)} that the policy took"
        raise DataError(explain("--turn", edit.turn, expected, fix))
    text = edited_text(agent.format, turns[edit.turn - 1][0], edit)
    is_kept = text is None and edit.documents is not None
    said = [_completion(one, agent) for one, _ in turns[: edit.turn - (not is_kept)]]
    opening = None if text is None else _written(text, agent, version)
    parts = (agent.limits, agent.format, agent.environment, tokenizer)
    player = ReplayAgent(*parts, recorded=recorded, edit=edit, find=find)
    start = start_trajectory(recorded.prompt, recorded.group, recorded.sample, recorded.seed)
    decode: Decode = tokenizer.decode  # type: ignore[attr-defined]  # as all of transformers
    return await player.run(start, ReplayEngine(engine, said, opening, decode), sampling)


def edited_text(format: DialogueFormat, said: Segment, edit: Edit) -> str | None:
    """What the turn says or begins with instead; None where it is left as it is."""
    if edit.text is not None or edit.query is None:
        return edit.text
    calls = format.parse(_completion(said)).calls
    old, new = "", edit.query
    if len(calls) == 1:
        asked = calls[0].arguments
        old = asked if isinstance(asked, str) else json.dumps(next(iter(asked.values()), ""))[1:-1]
        new = new if isinstance(asked, str) else json.dumps(new)[1:-1]
    before, found, after = said.text.rpartition(old) if old else ("", "", "")
    if not found:
        got = f"a turn with {len(calls)} calls, none of them to be edited this way"
        raise DataError(explain("query", got, "a turn that asks once", "edit its text instead"))
    return before + new + after


def _completion(said: Segment, agent: DialogueAgent | None = None) -> Completion:
    """A recorded turn as the engine gave it; by its length, whether it was cut."""
    is_cut = agent is not None and len(said.ids) == agent.limits.max_response_length
    is_cut = is_cut and not cut_at_stop(said.text, agent.format.stop)[1] if agent else False
    return Completion(said.ids, said.log_probs, said.text, "length" if is_cut else "stop",
                      said.weight_version, said.weight_versions)  # fmt: skip


def _written(text: str, agent: DialogueAgent, version: int) -> Completion:
    """What somebody wrote instead of a turn: it has no log-probs."""
    tokenizer: Any = agent.tokenizer
    text, is_over = cut_at_stop(text, agent.format.stop)
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    is_over = is_over or ids[-1:] == (tokenizer.eos_token_id,)
    none = (math.nan,) * len(ids)
    return Completion(ids, none, text, "stop" if is_over else "length", version)


def brought_by(turn: Turn, turns: Sequence[Said], format: DialogueFormat) -> Segment | None:
    """What the same calls brought in one of these turns."""
    for said, brought in turns:
        other = format.parse(_completion(said))
        if brought is not None and (other.calls, other.is_open) == (turn.calls, turn.is_open):
            return brought
    return None


def finder(folder: Path, format: DialogueFormat) -> Find:
    """Looks in every trajectory of a run's folder, in the order of its steps."""

    def find(turn: Turn) -> Segment | None:
        asked = [call.arguments for call in turn.calls]
        values = [v for one in asked for v in ([one] if isinstance(one, str) else one.values())]
        needles = [json.dumps(value).strip('"').encode() for value in values]
        for path in (step_path(folder, step) for step in recorded_steps(folder)):
            with path.open("rb") as lines:
                for line in lines:
                    if all(needle in line for needle in needles):
                        found = turns_of(parse_row(str(path), json.loads(line)).trajectory)
                        if (brought := brought_by(turn, found, format)) is not None:
                            return brought
        return None

    return find


@dataclass(frozen=True)
class Likeness:
    """How far a replay is the recorded trajectory."""

    num_tokens: int
    """Policy tokens that are the same, before the first that differs."""
    differs_at: tuple[int, int] | None
    """Segment and token within it of the first difference; None where there is none."""
    largest: float
    """The largest difference of a log-prob among the tokens that are the same, nats."""


def compared(recorded: Trajectory, replayed: Trajectory, turn: int = 1) -> Likeness:
    """The two held against each other, token by token; those before `turn` do not count."""
    number, num_tokens, largest = 0, 0, 0.0
    none = Segment(Origin.OBSERVATION, ())
    pairs = itertools.zip_longest(recorded.segments, replayed.segments, fillvalue=none)
    for place, (one, other) in enumerate(pairs):
        ids = list(itertools.zip_longest(one.ids, other.ids))
        same = next((i for i, (a, b) in enumerate(ids) if a != b), len(ids))
        if one.origin is Origin.POLICY:
            number += 1
            num_tokens += same * (number >= turn)
            both = list(zip(one.log_probs, other.log_probs, strict=False))[:same]
            largest = max([largest, *(abs(a - b) for a, b in both if math.isfinite(a - b))])
        if same < len(ids):
            return Likeness(num_tokens, (place, same), largest)
    return Likeness(num_tokens, None, largest)
