"""The rewards of a run: its options become a `RewardManager` that reads trajectories.

The one place where trajectories turn into the plain text that `search_r1.rewards` scores.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from search_r1.agent.generation import build_environment, build_tag_format
from search_r1.agent.grammar import Grammar
from search_r1.rewards import (
    LLM_JUDGE,
    BatchRewardFn,
    JudgeOptions,
    RewardInput,
    RewardScores,
    build_batch_reward,
    build_judge,
)
from search_r1.rewards.interface import Origin as OriginName
from search_r1.rewards.interface import OwnRewardError
from search_r1.rewards.judge.options import key_in
from verl import plugins
from verl.config import Config
from verl.config.reward import JudgeConfig, RewardConfig, StageConfig
from verl.config.rules import reward_names
from verl.errors import ConfigError, PluginError
from verl.rewards.interface import Reward, RewardManager
from verl.rewards.stages import StagedReward
from verl.types import Origin, Trajectory

ORIGIN_NAMES: dict[Origin, OriginName] = {
    Origin.PROMPT: "prompt",
    Origin.POLICY: "policy",
    Origin.OBSERVATION: "observation",
}


@dataclass(frozen=True)
class DialogueReward(RewardManager):
    """A rule over dialogues, applied to trajectories."""

    rule: BatchRewardFn
    grammar: Grammar

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Reward]:
        try:
            outputs = self.rule([reward_input(t, self.grammar) for t in trajectories])
        except OwnRewardError as error:
            raise PluginError(str(error)) from error
        return [Reward(output.score, output.components) for output in outputs]


def reward_input(trajectory: Trajectory, grammar: Grammar) -> RewardInput:
    """What a reward sees of a trajectory."""
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
    )


def build_reward_manager(config: Config) -> RewardManager:
    """The run's reward, its judge asked once. Raises ConfigError for what cannot work."""
    options, grammar = (
        config.reward_model,
        build_tag_format(config, build_environment(config).tools).tags,
    )
    sections: Sequence[RewardConfig | StageConfig] = options.stages or [options]
    names = reward_names(options)
    own = _own(config, names)
    manager = own.get(options.name)
    if isinstance(manager, RewardManager):
        return manager
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(RewardScores)}
    try:
        scores = RewardScores(**given)
        judge = None
        if LLM_JUDGE in names:  # known to answer before work starts
            asked = {
                f.name: getattr(options.judge, f.name) for f in dataclasses.fields(JudgeConfig)
            }
            key = key_in(asked.pop("api_key_env"), "judge.api_key_env")
            judge = build_judge(JudgeOptions(**asked, api_key=key))
            judge.check()
        rewards = [
            DialogueReward(build_batch_reward(s.name, scores, s.weights, judge, own), grammar)
            for s in sections
        ]
    except (TypeError, ValueError) as error:
        fix = "see docs/rewards.md"
        raise ConfigError(f"reward_model: {error}; {fix}") from error
    if not options.stages:
        return rewards[0]
    return StagedReward(options.stages, rewards)


def _own(config: Config, names: Iterable[str]) -> dict[str, Any]:
    """The rewards that were given from Python; a class of managers is called with the options."""
    found = {}
    for name in names:
        if name.startswith(plugins.PYTHON_PREFIX) or plugins.registered_object(name) is not None:
            one: Any = plugins.resolve("reward_model.name", name, {})
            is_manager = isinstance(one, type) and issubclass(one, RewardManager)
            found[name] = one(config) if is_manager else one
    return found
