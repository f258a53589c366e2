"""Builds a run's `RewardManager` from its options.

This module converts trajectories to the plain text that the rewards of `search_r1.rewards` score.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_r1.agent.generation import build_environment, build_tag_format
from search_r1.agent.grammar import SEARCH_R1, Grammar
from search_r1.rewards import (
    LLM_JUDGE,
    REWARDS,
    BatchRewardFn,
    RewardInput,
    build_batch_reward,
    build_judge,
)
from search_r1.rewards.interface import Origin as OriginName
from search_r1.rewards.interface import OwnRewardError
from search_r1.rewards.normalize import RULES, Normalize, normalize_answer
from search_r1.scoring_options import check_judge, read_judge, read_scores, reward_names
from verl import plugins
from verl.config import Config
from verl.config.reward import RewardConfig, StageConfig
from verl.errors import ConfigError, PluginError
from verl.rewards.interface import Reward, RewardManager
from verl.rewards.stages import StagedReward
from verl.types import Origin, Prompt, Trajectory

ORIGIN_NAMES: dict[Origin, OriginName] = {
    Origin.PROMPT: "prompt",
    Origin.POLICY: "policy",
    Origin.OBSERVATION: "observation",
}


@dataclass(frozen=True)
class DialogueReward(RewardManager):
    """A reward of `search_r1.rewards`, applied to trajectories."""

    rule: BatchRewardFn
    grammar: Grammar
    normalize: Normalize = normalize_answer
    names: frozenset[str] | None = None
    """Names of the rule's components; None if it is, or contains, a user's own function."""

    def component_names(self) -> frozenset[str] | None:
        return self.names

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Reward]:
        try:
            outputs = self.rule(
                [reward_input(t, self.grammar, self.normalize) for t in trajectories]
            )
        except OwnRewardError as error:
            raise PluginError(str(error)) from error
        return [Reward(output.score, output.components, output.is_right) for output in outputs]


def reward_input(
    trajectory: Trajectory, grammar: Grammar, normalize: Normalize = normalize_answer
) -> RewardInput:
    """Convert a trajectory to the input of a reward, which compares answers by `normalize`."""
    prompt = trajectory.prompt
    return RewardInput(
        policy_texts=[s.text for s in trajectory.segments if s.origin is Origin.POLICY],
        segments=[(ORIGIN_NAMES[s.origin], s.text) for s in trajectory.segments],
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        num_searches=int(trajectory.stats.get("valid_searches", 0)),
        num_invalid=int(trajectory.stats.get("invalid_actions", 0)),
        question=str(prompt.extra_info.get("question") or prompt.text),
        grammar=grammar,
        uid=prompt.uid,
        extra_info=prompt.extra_info,
        row_truth=_row_truth(prompt),
        normalize=normalize,
        stats=trajectory.stats,
    )


def _row_truth(prompt: Prompt) -> Any:
    """Return the ground truth as the row of the prompt has it."""
    usual = {"target": list(prompt.ground_truth)}
    return usual if prompt.row_truth is None else prompt.row_truth


def build_reward_manager(config: Config) -> RewardManager:
    """Build the run's reward and test its judge, if any, with one question. Raises ConfigError."""
    options = config.reward_model
    grammar = build_tag_format(config, build_environment(config).tools).tags
    sections: Sequence[RewardConfig | StageConfig] = options.stages or [options]
    names = reward_names(options)
    with _option_errors():
        scores = read_scores(options.scores, names)
        check_judge(options.judge)
    if (own := _own_manager(config)) is not None:
        return own
    with _option_errors():
        judge = None
        if LLM_JUDGE in names:
            cache = Path(config.trainer.default_local_dir) / "judge.sqlite"
            judge = build_judge(read_judge(options.judge, cache))
            judge.check()
        rules = [build_batch_reward(s.name, scores, s.weights, judge) for s in sections]
    normalize = RULES[options.normalize]
    rewards = [
        DialogueReward(rule, grammar, normalize, _component_names(rule, section))
        for rule, section in zip(rules, sections, strict=True)
    ]
    if not options.stages:
        return rewards[0]
    return StagedReward(options.stages, rewards)


@contextmanager
def _option_errors() -> Iterator[None]:
    """Turn what a reward says of its options into a ConfigError."""
    try:
        yield
    except (TypeError, ValueError) as error:
        fix = "see docs/guides/rewards.md"
        raise ConfigError(f"reward_model: {error}; {fix}") from error


def _own_manager(config: Config) -> RewardManager | None:
    """Return the reward manager that a program passed in from Python, if there is one."""
    reward: Any = plugins.registered_object(config.reward_model.name)
    is_class = isinstance(reward, type) and issubclass(reward, RewardManager)
    manager = reward(config) if is_class else reward
    return manager if isinstance(manager, RewardManager) else None


def _component_names(
    rule: BatchRewardFn, section: RewardConfig | StageConfig
) -> frozenset[str] | None:
    """Return the components of built-in rewards, from an exact match, which asks no judge."""
    if not {*(section.weights or (section.name,))} <= {*REWARDS, LLM_JUDGE}:
        return None
    tags = SEARCH_R1.answer
    [output] = rule([RewardInput([tags.wrap("x")], [("policy", tags.wrap("x"))], ["x"])])
    return frozenset(output.components)
