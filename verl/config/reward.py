"""Options of the reward: a rule, a judge, a weighted sum, or stages that follow each other."""

from dataclasses import dataclass
from typing import Any

from verl.config.option import option


@dataclass
class PlateauConfig:
    """End of a stage when a metric stops rising."""

    metric: str = option("critic/score/mean", resume="experiment")
    """Metric of the training step or of a validation (val/em); higher is better."""
    patience: int = option(10, resume="experiment", ge=1)
    """Number of consecutive values without a new best after which the stage ends."""
    min_delta: float = option(0.0, resume="experiment", ge=0)
    """Minimum increase over the best value that counts as a new best."""


@dataclass
class StageConfig:
    """One stage of a reward that changes during the run."""

    name: str = option("em", resume="experiment")
    """Reward of the stage, as in `reward_model.name`."""
    weights: dict[str, float] = option(factory=dict, resume="experiment", ge=-1000, le=1000)
    """Weighted sum of rewards instead of `name`, as in `reward_model.weights`."""
    until_step: int | None = option(None, resume="experiment", ge=1)
    """Last step of the stage; null ends it by `plateau`, or never for the last stage."""
    plateau: PlateauConfig | None = option(None, resume="experiment")
    """Ends the stage when a metric stops rising, even before `until_step`."""


@dataclass
class RewardConfig:
    """The reward of a trajectory."""

    name: str = option("em", resume="experiment")
    """A reward of docs/guides/rewards.md, or a custom `path/to/file.py:function`."""
    weights: dict[str, float] = option(factory=dict, resume="experiment", ge=-1000, le=1000)
    """Weighted sum of rewards (`{em: 1.0, f1: 0.5}`) instead of `name`."""
    stages: list[StageConfig] = option(factory=list, resume="experiment")
    """Rewards that follow each other (`[{name: em_format, until_step: 100}, {name: em}]`) instead
    of `name`; every stage but the last needs an end."""
    normalize: str = option("squad", resume="experiment", choices=("squad", "unicode"))
    """Rule by which answers are compared: squad, the published one (ASCII punctuation), or unicode
    (docs/guides/rewards.md)."""
    scores: dict[str, Any] = option(factory=dict, resume="logged")
    """Partial scores and costs by name: {structure_format_score: 0.2} for em_format
    (docs/guides/rewards.md)."""
    judge: dict[str, Any] = option(factory=dict, resume="logged")
    """The language model behind llm_judge: its `url` and `model`, and the other settings of
    docs/guides/rewards.md."""
