"""The rollout loop: generate to a closing tag, act, append what comes back, repeat.

One coroutine makes one trajectory. Ids go to the engine as they were sampled and are never
decoded and re-encoded; what the environment adds is encoded once and marked as observation. The
context only grows: when the budget is spent the trajectory ends.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from transformers import AutoTokenizer

from search_r1.agent.grammar import has_broken_tags
from search_r1.agent.tags import TEMPLATES, Action, ActionKind, Template, parse_action
from search_r1.search.client import EmptyRetrieval, Retrieval, RetrievalClient
from search_r1.search.errors import SearchError
from search_r1.search.schema import Document
from search_r1.search.tally import counting
from verl.config import Config
from verl.config.retriever import EMPTY
from verl.errors import ConfigError, explain
from verl.types import Completion, Engine, Origin, Sampling, Segment, Status, Trajectory


class Tokenizer(Protocol):
    """What the agent needs of a Hugging Face tokenizer."""

    @property
    def all_special_tokens(self) -> list[str]: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True)
class AgentConfig:
    """Budgets and wording of one dialogue; all lengths are in tokens."""

    max_turns: int = 2
    """Searches a trajectory may make; a last turn without search follows."""
    max_response_length: int = 500
    """What the policy may sample in one turn."""
    max_obs_length: int = 500
    """One observation, wrapping included."""
    max_prompt_length: int = 4096
    """What the engine may be given at any turn."""
    do_search: bool = True
    """False makes every search an invalid action."""
    no_think_rl: bool = False
    """Close the thinking part before the policy starts, on every turn."""
    template: Template = TEMPLATES["search_r1"]
    """Wording of observations and feedback."""


@dataclass(frozen=True)
class SearchAgent:
    """The `Agent` that searches; it keeps nothing between trajectories."""

    config: AgentConfig
    tokenizer: Tokenizer
    retrieval: Retrieval

    def __post_init__(self) -> None:
        """Refuse settings under which no dialogue could go well."""
        wording = self.config.template
        _refuse_closed_think(wording, self.config.no_think_rl)
        for name, text in (("empty observation", wording.observation([])),
                           ("invalid-action feedback", wording.invalid_action)):  # fmt: skip
            needed = len(self._encode(text + self._opening))
            if needed > self.config.max_obs_length:
                raise ConfigError(
                    explain(
                        "data.max_obs_length",
                        self.config.max_obs_length,
                        f"at least {needed} for the {name} of template {wording.name!r}",
                        f"set data.max_obs_length={needed} or more",
                    )
                )

    async def run(self, start: Trajectory, engine: Engine, sampling: Sampling) -> Trajectory:
        """Play one dialogue to its end; see `verl.types.Agent`."""
        trajectory = replace(start, segments=list(start.segments), stats={}, faults={})
        counts: Counter[str] = Counter()
        if self._opening:
            trajectory.segments.append(self._added(Origin.PROMPT, self._opening))
        with counting() as faults:
            try:
                trajectory.status = await self._play(trajectory, engine, sampling, counts)
            except SearchError as error:
                trajectory.status, trajectory.error = Status.FAILED, str(error)
        has_failed = trajectory.status is Status.FAILED
        trajectory.faults = {**faults, "searches_failed": int(has_failed)}
        trajectory.stats = _stats(counts, trajectory)
        return trajectory

    async def _play(
        self, trajectory: Trajectory, engine: Engine, sampling: Sampling, counts: Counter[str]
    ) -> Status:
        """Take turns until one of them ends the dialogue."""
        for turn in range(self.config.max_turns + 1):
            if trajectory.num_tokens > self.config.max_prompt_length:
                return Status.OUT_OF_BUDGET
            request = self._request(sampling, trajectory.seed, turn)
            completion = await engine.generate(trajectory.ids, request)
            trajectory.segments.append(_policy_segment(completion))
            action = parse_action(completion.text, self.config.template.tags)
            is_last = turn == self.config.max_turns
            counts.update(self._counts(completion, action, is_last))
            if action.kind is ActionKind.ANSWER:
                return Status.ANSWERED
            if is_last:
                return Status.OUT_OF_TURNS
            observation = await self._observe(action)
            if trajectory.num_tokens + len(observation.ids) > self.config.max_prompt_length:
                return Status.OUT_OF_BUDGET
            trajectory.segments.append(observation)
            counts["observation_tokens"] += len(observation.ids)
        raise AssertionError("the last turn always returns")

    def _request(self, sampling: Sampling, seed: int | None, turn: int) -> Sampling:
        """This turn's sampling: our stop tags and length, and a seed of its own."""
        return replace(
            sampling,
            max_tokens=self.config.max_response_length,
            stop=self.config.template.stop,
            seed=None if seed is None else derived_seed(seed, turn),
        )

    def _counts(self, completion: Completion, action: Action, is_last: bool) -> dict[str, int]:
        """What one turn adds to the statistics."""
        wants_search = action.kind is ActionKind.SEARCH
        searched = wants_search and self.config.do_search and not is_last
        is_valid = searched or action.kind is ActionKind.ANSWER
        return {
            "turns": 1,
            "searches": int(wants_search),
            "valid_searches": int(searched),
            "valid_actions": int(is_valid),
            "invalid_actions": int(not is_valid),
            "truncated_turns": int(completion.finish_reason == "length"),
            "malformed_turns": int(
                action.kind is ActionKind.INVALID
                or has_broken_tags(completion.text, self.config.template.tags)
            ),
        }

    async def _observe(self, action: Action) -> Segment:
        """What the environment answers to a search or to an invalid action."""
        if action.kind is ActionKind.SEARCH and self.config.do_search:
            text = self.observation(await self.retrieval.search(action.content))
        else:
            text = self.config.template.invalid_action
        return self._added(Origin.OBSERVATION, text + self._opening)

    def observation(self, documents: Sequence[Document]) -> str:
        """Wrapped passages within `max_obs_length` tokens: whole ones, best first.

        Only a first passage that does not fit by itself is cut, at a word; if not even its title
        fits, the observation is empty.
        """
        for count in range(len(documents), 0, -1):
            if self._fits(documents[:count]):
                return self._wrap(documents[:count])
        cut = [self._cut(document) for document in documents[:1]]
        return self._wrap(cut if self._fits(cut) else [])

    def _cut(self, document: Document) -> Document:
        """The passage with as many leading words of its text as fit."""
        words = document.text.split(" ")
        low, high = 0, len(words)
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits([replace(document, text=" ".join(words[:middle]))]):
                low = middle
            else:
                high = middle - 1
        return replace(document, text=" ".join(words[:low]))

    def _wrap(self, documents: Sequence[Document]) -> str:
        return self.config.template.observation(documents, self.tokenizer.all_special_tokens)

    def _fits(self, documents: Sequence[Document]) -> bool:
        text = self._wrap(documents) + self._opening
        return len(self._encode(text)) <= self.config.max_obs_length

    @property
    def _opening(self) -> str:
        """What precedes every policy turn by configuration."""
        return self.config.template.closed_think if self.config.no_think_rl else ""

    def _added(self, origin: Origin, text: str) -> Segment:
        return Segment(origin, tuple(self._encode(text)), text)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def derived_seed(*parts: int | str) -> int:
    """A 31-bit seed that depends on every part, such as a trajectory's seed and the turn."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


def build_agent(config: Config) -> SearchAgent:
    """The agent of a training run: tokenizer of the policy's folder, the configured retriever."""
    agent_config = AgentConfig(
        max_turns=config.max_turns,
        max_response_length=config.data.max_response_length,
        max_obs_length=config.data.max_obs_length,
        max_prompt_length=config.data.max_prompt_length,
        do_search=config.do_search,
        no_think_rl=config.algorithm.no_think_rl,
        template=chosen_template(config),
    )
    tokenizer = AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path)
    return SearchAgent(agent_config, tokenizer, build_retrieval(config))


def chosen_template(config: Config) -> Template:
    """The run's template. Raises ConfigError for one that is not there, or cannot work."""
    if config.template not in TEMPLATES:
        expected = f"one of {', '.join(TEMPLATES)}"
        raise ConfigError(explain("template", config.template, expected, "name one"))
    template = TEMPLATES[config.template]
    _refuse_closed_think(template, config.algorithm.no_think_rl)
    return template


def _refuse_closed_think(template: Template, no_think_rl: bool) -> None:
    """A dialogue whose searches are part of the thinking cannot do without it."""
    if no_think_rl and template.tags.searches_in_think:
        expected = f"false: template {template.name!r} searches while it thinks"
        fix = "algorithm.no_think_rl=false, or template=search_r1"
        raise ConfigError(explain("algorithm.no_think_rl", True, expected, fix))


def build_retrieval(config: Config) -> Retrieval:
    """The configured retriever, or none for url `empty`."""
    retriever = config.retriever
    if retriever.url == EMPTY:
        return EmptyRetrieval()
    return RetrievalClient(
        retriever.url,
        retriever.topk,
        timeout=retriever.timeout,
        max_retries=retriever.max_retries,
        deadline=retriever.deadline,
    )


def _policy_segment(completion: Completion) -> Segment:
    return Segment(
        Origin.POLICY,
        completion.ids,
        completion.text,
        completion.log_probs,
        completion.weight_version,
    )


def _stats(counts: Counter[str], trajectory: Trajectory) -> dict[str, float]:
    """Every statistic of a trajectory, zeros included."""
    names = ("turns", "searches", "valid_searches", "valid_actions", "invalid_actions",
             "observation_tokens", "truncated_turns", "malformed_turns")  # fmt: skip
    answered = float(trajectory.status is Status.ANSWERED)
    return {**{name: float(counts[name]) for name in names}, "answered": answered}
