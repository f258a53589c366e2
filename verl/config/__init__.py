"""The options of a training run, one dataclass per section, with their defaults and limits.

Hydra composes them to a `Config` (`verl/config/cli.py`), and `verl.config.known.check` refuses
settings that cannot work before anything starts. A config is not changed after the start of a run.
Option names are those of the original scripts; options without effect are listed in
`verl/config/legacy.yaml`, and setting one logs a warning.
"""

from verl.config.agent import AgentConfig, ServerConfig
from verl.config.algorithm import (
    AlgorithmConfig,
    FilterGroupsConfig,
    KlControlConfig,
    OverlongBufferConfig,
)
from verl.config.data import DataConfig
from verl.config.policy import (
    ALL_LINEAR,
    ActorConfig,
    ActorRolloutRefConfig,
    AdapterConfig,
    CriticConfig,
    CriticModelConfig,
    FsdpConfig,
    ModelConfig,
    OptimConfig,
    RefConfig,
    RolloutConfig,
    ValSamplingConfig,
)
from verl.config.reward import RewardConfig
from verl.config.run import Config
from verl.config.trainer import GuardConfig, TrainerConfig

__all__ = [
    "ALL_LINEAR", "ActorConfig", "ActorRolloutRefConfig", "AdapterConfig", "AgentConfig",
    "AlgorithmConfig", "Config", "CriticConfig", "CriticModelConfig", "DataConfig",
    "FilterGroupsConfig", "FsdpConfig", "GuardConfig", "KlControlConfig", "ModelConfig",
    "OptimConfig", "OverlongBufferConfig", "RefConfig", "RewardConfig", "RolloutConfig",
    "ServerConfig", "TrainerConfig", "ValSamplingConfig",
]  # fmt: skip
