"""Replay one recorded dialogue with the run's agent, from a given turn on.

Earlier turns come from the record, and so do the results of all calls that some trajectory of the
run also made. The rest is sampled, with the seeds of the recorded turns.
"""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verl.agent.dialogue import DialogueAgent, derived_seed
from verl.agent.interface import DialogueFormat, Item, Turn
from verl.data.trajectories import parse_row, recorded_steps, step_path
from verl.engine import RolloutEngine
from verl.errors import DataError, ToolError, explain
from verl.rollout.stops import cut_at_stop
from verl.types import Completion, Origin, Sampling, Segment, Status, Trajectory, start_trajectory

RecordedTurn = tuple[Segment, Segment | None]
"""A policy turn and the environment's response, which is None after the last turn."""
FindResponse = Callable[[Turn], Segment | None]
"""Looks up the response to a turn's calls in other trajectories of the run."""
Decode = Callable[[Sequence[int]], str]
NUM_BEFORE = 16
"""Number of tokens before a turn that are decoded together with it, since some tokenizers drop the
leading space of a text."""


@dataclass(frozen=True)
class Edit:
    """The change to a trajectory; without one it is replayed unchanged."""

    turn: int = 1
    """The policy's turn from which it is replayed, counted from 1."""
    query: str | None = None
    """New query of the turn's call."""
    text: str | None = None
    """New text of the turn; the policy continues it unless it ends a turn."""
    documents: Sequence[Sequence[Item]] | None = None
    """New results of each call of the turn."""

    @property
    def changes(self) -> list[str]:
        """Names of the edited parts."""
        return [n for n in ("query", "text", "documents") if getattr(self, n) is not None]


def turns_of(trajectory: Trajectory) -> list[RecordedTurn]:
    """Return the policy's turns in order, each with the environment's response."""
    following = [*trajectory.segments[1:], None]
    return [
        (turn, after if after is not None and after.origin is Origin.OBSERVATION else None)
        for turn, after in zip(trajectory.segments, following, strict=True)
        if turn.origin is Origin.POLICY
    ]


@dataclass(frozen=True)
class ReplayAgent(DialogueAgent):
    """The run's agent; it calls tools only if the run has no recorded result of the same call."""

    recorded: Trajectory = field(kw_only=True)
    edit: Edit = field(kw_only=True)
    find_response: FindResponse = field(kw_only=True)

    async def _respond(self, trajectory: Trajectory, turn: Turn, acts: bool) -> Segment:
        """Return the recorded response, the edited one, or a new one from the tools."""
        turns, documents = turns_of(self.recorded), self.edit.documents
        number = len(turns_of(trajectory)) - 1
        if number < self.edit.turn - 1 and (response := turns[number][1]) is not None:
            return response
        if number == self.edit.turn - 1 and documents is not None:
            if len(turn.calls) != len(documents):
                got = f"{len(documents)} lists"
                expected = f"{len(turn.calls)}, one for each call of turn {number + 1}"
                raise DataError(explain("documents", got, expected, "name a turn that searches"))
            return self._encoded_segment(
                Origin.OBSERVATION, self._response_text(turn, self.fit(turn, documents))
            )
        was_too_long = self.recorded.status is Status.OUT_OF_BUDGET
        if acts and was_too_long and trajectory.ids == self.recorded.ids:
            # The response exceeded the budget and was not recorded: return one that does, too.
            return Segment(Origin.OBSERVATION, (0,) * (self.limits.max_prompt_length + 1))
        if acts:
            own_turns = [*turns[number:], *turns[:number]]
            response = recorded_response(turn, own_turns, self.format) or self.find_response(turn)
            if response:
                return response
        try:
            return await super()._respond(trajectory, turn, acts)
        except ToolError as error:
            calls = "; ".join(f"{call.tool} {call.arguments}" for call in turn.calls)
            fix = "name another retriever by --retriever-url, or edit the documents"
            raise ToolError(
                f"{calls} was never recorded, and {error}; {fix}", error.faults
            ) from error


@dataclass
class ReplayEngine(RolloutEngine):
    """Returns recorded turns, then the edited one, completed if needed, and samples the rest."""

    engine: RolloutEngine
    recorded: Sequence[Completion]
    edited: Completion | None
    """Text of the turn after the recorded ones, or the beginning of it."""
    decode: Decode
    num_turns: int = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        number, self.num_turns = self.num_turns, self.num_turns + 1
        if number < len(self.recorded):
            return self.recorded[number]
        edited = self.edited
        if number > len(self.recorded) or edited is None:
            return await self.engine.generate(prompt_ids, sampling)
        if edited.finish_reason == "stop":
            return edited
        if len(edited.ids) >= sampling.max_tokens:
            got, fix = f"{len(edited.ids)} tokens that do not end the turn", "shorten it"
            expected = f"fewer than {sampling.max_tokens} (data.max_response_length)"
            raise DataError(explain("the edited text", got, expected, fix))
        return await complete(edited, self.engine, prompt_ids, sampling, self.decode)


async def complete(
    begun: Completion, engine: RolloutEngine, prompt_ids: Sequence[int], sampling: Sampling,
    decode: Decode,
) -> Completion:  # fmt: skip
    """Sample the rest of a turn; also find a stop string that begins in what was `begun`.

    The engine sees only the text of its own request, so it may have sampled beyond such a string.
    """
    num_begun, before = len(begun.ids), list(prompt_ids[-NUM_BEFORE:])
    # The seed of the turn itself would repeat the random numbers of its first tokens.
    seed = None if sampling.seed is None else derived_seed(sampling.seed, num_begun)
    rest_of_it = replace(sampling, max_tokens=sampling.max_tokens - num_begun, seed=seed)
    rest = await engine.generate([*prompt_ids, *begun.ids], rest_of_it)
    ids = begun.ids + rest.ids

    def cut(end: int) -> tuple[str, bool]:
        text = decode([*before, *ids[:end]])[len(decode(before)) :]
        return cut_at_stop(text, sampling.stop)

    end = next((end for end in range(num_begun, len(ids)) if cut(end)[1]), len(ids))
    reason = "stop" if cut(end)[1] else rest.finish_reason
    log_probs = (begun.log_probs + rest.log_probs)[:end]
    return Completion(ids[:end], log_probs, cut(end)[0], reason, rest.weight_version)


async def replay_trajectory(
    agent: DialogueAgent, engine: RolloutEngine, recorded: Trajectory, edit: Edit,
    sampling: Sampling, version: int, find_response: FindResponse = lambda turn: None,
) -> Trajectory:  # fmt: skip
    """Replay a trajectory from the edit's turn on. Raises DataError if there is no such turn."""
    turns, tokenizer = turns_of(recorded), agent.tokenizer
    if edit.turn > len(turns):
        fix, expected = f"--turn {len(turns)}", f"one of the policy's {len(turns)} turns"
        raise DataError(explain("--turn", edit.turn, expected, fix))
    text = edited_turn_text(agent.format, turns[edit.turn - 1][0], edit)
    edits_only_documents = text is None and edit.documents is not None
    num_recorded = edit.turn if edits_only_documents else edit.turn - 1
    completions = [_completion(turn, agent) for turn, _ in turns[:num_recorded]]
    edited = None if text is None else _edited_completion(text, agent, version)
    parts = (agent.limits, agent.format, agent.environment, tokenizer)
    player = ReplayAgent(*parts, recorded=recorded, edit=edit, find_response=find_response)
    start = start_trajectory(recorded.prompt, *recorded.key, recorded.seed)
    before = itertools.takewhile(lambda s: s.origin is not Origin.POLICY, recorded.segments)
    start.segments += [s for s in before if s.origin is Origin.OBSERVATION]  # documents_first
    decode: Decode = tokenizer.decode  # type: ignore[attr-defined]  # transformers' tokenizers have it
    return await player.run(start, ReplayEngine(engine, completions, edited, decode), sampling)


def edited_turn_text(format: DialogueFormat, recorded: Segment, edit: Edit) -> str | None:
    """Return the new text of a turn, or the beginning of it; None if it stays as recorded."""
    if edit.text is not None or edit.query is None:
        return edit.text
    calls = format.parse(_completion(recorded)).calls
    old, new = "", edit.query
    if len(calls) == 1:
        query = calls[0].arguments
        if isinstance(query, str):
            old = query
        else:  # a native call: the query is its first argument, written as a JSON string
            old, new = json.dumps(next(iter(query.values()), ""))[1:-1], json.dumps(new)[1:-1]
    before, match, after = recorded.text.rpartition(old) if old else ("", "", "")
    if not match:
        got = f"a turn with {len(calls)} calls, whose query cannot be replaced"
        raise DataError(explain("query", got, "a turn with one call", "edit its text instead"))
    return before + new + after


def _completion(turn: Segment, agent: DialogueAgent | None = None) -> Completion:
    """Return a recorded turn as the engine returned it; `agent` tells whether it was truncated."""
    is_truncated = (
        agent is not None
        and len(turn.ids) == agent.limits.max_response_length
        and not cut_at_stop(turn.text, agent.format.stop)[1]
    )
    return Completion(turn.ids, turn.log_probs, turn.text, "length" if is_truncated else "stop",
                      turn.weight_version)  # fmt: skip


def _edited_completion(text: str, agent: DialogueAgent, version: int) -> Completion:
    """Return a user's text of a turn as a completion; its log-probs are NaN."""
    tokenizer: Any = agent.tokenizer
    text, is_complete = cut_at_stop(text, agent.format.stop)
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    is_complete = is_complete or ids[-1:] == (tokenizer.eos_token_id,)
    log_probs = (math.nan,) * len(ids)
    return Completion(ids, log_probs, text, "stop" if is_complete else "length", version)


def recorded_response(
    turn: Turn, turns: Sequence[RecordedTurn], format: DialogueFormat
) -> Segment | None:
    """Return the response to the same calls in one of these turns, or None."""
    for recorded, response in turns:
        other = format.parse(_completion(recorded))
        if response is not None and (other.calls, other.is_open) == (turn.calls, turn.is_open):
            return response
    return None


def response_finder(folder: Path, format: DialogueFormat) -> FindResponse:
    """Return a function that searches all trajectories in a folder, in the order of the steps."""

    def find_response(turn: Turn) -> Segment | None:
        # Only lines that contain every argument are parsed.
        values: list[Any] = []
        for arguments in (call.arguments for call in turn.calls):
            values += [arguments] if isinstance(arguments, str) else arguments.values()
        needles = [json.dumps(value).strip('"').encode() for value in values]
        for path in (step_path(folder, step) for step in recorded_steps(folder)):
            with path.open("rb") as lines:
                for line in lines:
                    if all(needle in line for needle in needles):
                        turns = turns_of(parse_row(str(path), json.loads(line)).trajectory)
                        if (response := recorded_response(turn, turns, format)) is not None:
                            return response
        return None

    return find_response


@dataclass(frozen=True)
class Comparison:
    """How far a replay matches the recorded trajectory."""

    num_tokens: int
    """Equal policy tokens before the first difference, from the replayed turn on."""
    differs_at: tuple[int, int] | None
    """Segment of the first different token and its index in it; None if all are equal."""
    largest: float
    """Largest difference of log-probs among the equal tokens, in nats."""

    @property
    def is_identical(self) -> bool:
        return self.differs_at is None and self.largest == 0

    @classmethod
    def of(cls, recorded: Trajectory, replayed: Trajectory, turn: int = 1) -> "Comparison":
        """Compare token by token; tokens of turns before `turn` are not counted."""
        number, num_tokens, largest = 0, 0, 0.0
        nothing = Segment(Origin.OBSERVATION, ())
        pairs = itertools.zip_longest(recorded.segments, replayed.segments, fillvalue=nothing)
        for index, (one, other) in enumerate(pairs):
            ids = list(itertools.zip_longest(one.ids, other.ids))
            num_equal = next((i for i, (a, b) in enumerate(ids) if a != b), len(ids))
            if one.origin is Origin.POLICY:
                number += 1
                num_tokens += num_equal if number >= turn else 0
                both = list(zip(one.log_probs, other.log_probs, strict=False))[:num_equal]
                largest = max([largest, *(abs(a - b) for a, b in both if math.isfinite(a - b))])
            if num_equal < len(ids):
                return cls(num_tokens, (index, num_equal), largest)
        return cls(num_tokens, None, largest)
