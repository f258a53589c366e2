"""Every option of a training run: one dataclass a section, one home for each default.

Hydra composes these (see `verl/config/cli.py`), `check` refuses settings that cannot work
before anything starts. Nothing here starts work, and nobody mutates a config after start. Option
names are those of the original scripts; those that have no effect any more are listed in
`verl/config/legacy.yaml`, and a run that sets one is warned.
"""

from verl.config.agent import AgentConfig, ServerConfig
from verl.config.algorithm import (
    AlgorithmConfig,
    CompatConfig,
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
    "AlgorithmConfig", "CompatConfig", "Config", "CriticConfig", "CriticModelConfig", "DataConfig",
    "FilterGroupsConfig", "FsdpConfig", "GuardConfig", "KlControlConfig", "ModelConfig",
    "OptimConfig", "OverlongBufferConfig", "RefConfig", "RewardConfig", "RolloutConfig",
    "ServerConfig", "TrainerConfig", "ValSamplingConfig",
]  # fmt: skip
