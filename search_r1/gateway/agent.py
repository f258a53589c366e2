"""A loop written against an OpenAI client as the agent of a run: `agent.name=loop:FILE.py:NAME`.

An episode is one call of the loop. Its trajectory has the tokens that the gateway sampled for it,
and as context whatever stood between them.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from search_r1.agent.documents_first import known_question
from search_r1.agent.generation import build_format
from search_r1.gateway.episode import NO_TURNS, TOO_LONG, Episode, Policy
from search_r1.gateway.history import EpisodeHistory, Renderer
from search_r1.gateway.loops import OPTION, Players, UserLoop
from search_r1.gateway.service import Gateway
from verl.agent.dialogue import Limits
from verl.agent.environment import Environment
from verl.agent.grammar import Grammar, answer_pattern
from verl.agent.native import NativeFormat
from verl.config import Config
from verl.engine import RolloutEngine
from verl.errors import ConfigError, PluginError, explain, first_line
from verl.plugins import user_code_location
from verl.types import Origin, Sampling, Segment, Status, Trajectory

FAILED = "loops_failed"
"""Fault name: episodes whose loop raised, or ended without a turn."""
REWARD = "loop_reward"
"""Statistic: the number that the loop returned, if it returned one."""
OTHER_ANSWER = "a text as the answer, a finite number as the reward, or nothing"


@dataclass
class LoopAgent:
    """An `Agent` whose dialogues are episodes of a loop."""

    loop: UserLoop
    policy: Policy
    gateway: Gateway = field(default_factory=Gateway)
    players: Players = field(init=False)

    def __post_init__(self) -> None:
        self.players = Players(self.loop)

    async def run(self, start: Trajectory, engine: RolloutEngine, sampling: Sampling) -> Trajectory:
        """Play one episode; see `verl.agent.interface.Agent`."""
        trajectory = replace(start, segments=list(start.segments), stats={}, faults={FAILED: 0})
        here = asyncio.get_running_loop()
        episode = Episode(self.policy, engine, sampling, start.seed, here)
        try:
            returned = await self._play(episode, start)
        except LoopFailed as failure:
            trajectory.fail(str(failure))
            trajectory.faults = {FAILED: 1}
            returned = None
        if rows := episode.history.rows():
            trajectory.segments = [segment for row in rows for segment in row]
        tags = self.policy.renderer.tags
        if trajectory.status is not Status.FAILED:
            if isinstance(returned, str):
                add_answer(trajectory, returned, tags)
            trajectory.status = status_of(episode, trajectory, returned, tags)
        trajectory.stats = statistics(episode.history, trajectory)
        if isinstance(returned, int | float):
            trajectory.stats[REWARD] = float(returned)
        return trajectory

    async def _play(self, episode: Episode, start: Trajectory) -> Any:
        """Run the loop to its end, or to that of the episode; return what it returns.

        Raises LoopFailed, what the engine raised, or PluginError for a loop that cannot work.
        """
        question = known_question(start.prompt) if "question" in self.loop.arguments else ""
        with self.gateway.serving(episode) as (base_url, key):
            values = self.loop.values(base_url, key, question, start.prompt)
            playing = asyncio.wrap_future(self.players.start(base_url, key, values))
            try:
                await asyncio.wait((playing, episode.over), return_when=asyncio.FIRST_COMPLETED)
                if episode.over.done():
                    episode.over.result()  # raises what the engine raised
                    returned = None
                else:
                    returned = self._returned(episode, playing)
            finally:
                playing.cancel()
                await episode.aclose()
        if not episode.history.turns:
            reason = episode.last_refusal or "it asked nothing of its base_url"
            raise LoopFailed(f"{self.loop.name} ended without a sampled turn: {reason}")
        self._check(returned)
        return returned

    def _returned(self, episode: Episode, playing: asyncio.Future[Any]) -> Any:
        """Return what the loop returned; None if a limit of the run ended it. Raises as `_play`."""
        if playing.cancelled():
            raise LoopFailed(f"{self.loop.name} cancelled itself")
        try:
            return playing.result()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code: a failed episode
            self._explain(episode, error)
            return None

    def _explain(self, episode: Episode, error: BaseException) -> None:
        """Return if limits of the run ended the loop. Raises LoopFailed or PluginError."""
        refusal = episode.last_refusal
        where = user_code_location(error) or "in a library"
        if episode.is_refused:
            got = f"{refusal} ({where})"
            expected = "requests that a run can follow"
            raise PluginError(explain(self.loop.name, got, expected, "correct the loop")) from error
        if refusal is None or refusal.code not in (TOO_LONG, NO_TURNS):
            kind = type(error).__name__
            raise LoopFailed(f"{self.loop.name}: {kind}: {first_line(error)} ({where})") from error

    def _check(self, returned: Any) -> None:
        """Raise PluginError for a result of another kind, such as a message."""
        is_number = isinstance(returned, int | float) and math.isfinite(returned)
        if not (returned is None or isinstance(returned, str) or is_number):
            got = f"{returned!r} from {self.loop.name}"
            raise PluginError(explain(OPTION, got, OTHER_ANSWER, "return message.content"))


class LoopFailed(Exception):
    """The episode has no outcome that the policy is responsible for."""


def build_agent(config: Config) -> LoopAgent:
    """Build the agent of a run. Raises ConfigError for a loop or a model that cannot work."""
    loop = UserLoop.of_run(config)
    return LoopAgent(loop, policy_of(config, tokenizer_of(config)))


def tokenizer_of(config: Config) -> Any:
    """Load a run's tokenizer. Raises ConfigError for one without a chat template."""
    from verl.model_files import load_tokenizer  # noqa: PLC0415 - transformers: seconds

    path, name = config.actor_rollout_ref.model.path, config.agent.name
    tokenizer = load_tokenizer(path, template_kwargs=config.data.chat_template_kwargs)
    if not tokenizer.chat_template:
        fix = "use an instruct model"
        raise ConfigError(
            explain(OPTION, f"{name} with {path}", "a model with a chat template", fix)
        )
    return tokenizer


def policy_of(config: Config, tokenizer: Any) -> Policy:
    """Return how a run's turns are written."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    limits = Limits(
        config.max_turns, data.max_response_length, data.max_obs_length, data.max_prompt_length,
        config.algorithm.no_think_rl,
    )  # fmt: skip
    format = build_format(config, Environment(), tokenizer)
    calls = NativeFormat(tokenizer, ())
    opening = calls.closed_think if limits.no_think_rl else ""
    renderer = Renderer(tokenizer, format.tags, opening)
    sampling = Sampling(limits.max_response_length, rollout.temperature, rollout.top_p)
    return Policy(limits, renderer, calls, format, sampling)


def build_environment(config: Config) -> Environment:
    """Return no tools, since the loop has its own. Raises ConfigError for a loop that is none."""
    UserLoop.of_run(config)
    return Environment(enabled=config.do_search)


def add_answer(trajectory: Trajectory, answer: str, tags: Grammar) -> None:
    """Let rewards read the answer that the loop returned: a segment of text without tokens."""
    said = [s.text for s in trajectory.segments if s.origin is Origin.POLICY]
    answers = [a for text in said for a in answer_pattern(tags).findall(text)]
    if answer_pattern(tags).search(answer) or (answers and answers[-1].strip() == answer.strip()):
        return  # it stands in the last message
    trajectory.segments.append(Segment(Origin.POLICY, (), tags.answer.wrap(answer.strip())))


def status_of(episode: Episode, trajectory: Trajectory, returned: Any, tags: Grammar) -> Status:
    """Return how an episode ended that did not fail."""
    last = episode.history.turns[-1].answer
    is_answered = not last.calls and answer_pattern(tags).search(trajectory.segments[-1].text)
    if is_answered or isinstance(returned, int | float):
        return Status.ANSWERED
    refusal = episode.last_refusal
    is_over = refusal is not None and refusal.code == TOO_LONG
    return Status.OUT_OF_BUDGET if is_over else Status.OUT_OF_TURNS


def statistics(history: EpisodeHistory, trajectory: Trajectory) -> dict[str, float]:
    """Return the statistics of an episode, by the names of the built-in loop."""
    counts: Counter[str] = Counter()
    for turn in history.turns:
        counts.update(metric_of(call.tool) for call in turn.answer.calls)
        executed: Mapping[str, int] = turn.executed
        counts.update({f"valid_{metric_of(name)}": n for name, n in executed.items()})
        counts["valid_actions"] += bool(executed)
        counts["truncated_turns"] += turn.is_truncated
        counts["malformed_turns"] += turn.is_malformed
    answered = trajectory.status is Status.ANSWERED
    counts["valid_actions"] += answered
    counts["turns"] = len(history.turns)
    counts["invalid_actions"] = counts["turns"] - counts["valid_actions"]
    counts["observation_tokens"] = trajectory.num_tokens_of(Origin.OBSERVATION)
    counts["rows"] = len(history.rows())
    metrics = [metric_of(name) for name in history.tool_names]
    calls = [name for metric in metrics for name in (metric, f"valid_{metric}")]
    names = ("turns", *calls, "valid_actions", "invalid_actions", "observation_tokens",
             "truncated_turns", "malformed_turns", "rows")  # fmt: skip
    return {**{name: float(counts[name]) for name in names}, "answered": float(answered)}


def metric_of(tool: str) -> str:
    """Return the plural under which calls of a tool are counted, as the built-in tools have it."""
    return "searches" if tool == "search" else f"{tool}_calls"
