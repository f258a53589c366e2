"""Writes the trained policy as a Hugging Face folder, with what its dialogues need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from verl.agent.environment import Environment
from verl.agent.served import tool_settings
from verl.agent.settings import DialogueSettings
from verl.checkpoint.folders import TOKENIZER_FOLDER, RunState
from verl.config import Config
from verl.trainer.hooks import FileWriter, Hook
from verl.training.weights import copy_tokenizer

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer


class Export(Hook):
    """Writes `model/` below the run's folder at the end, and dialogue settings in checkpoints."""

    def __init__(self, config: Config, environment: Environment, dtype: str) -> None:
        """`environment`: the agents' tools, which are described in the exported model."""
        self.config, self.dtype = config, dtype
        self.settings = DialogueSettings(config, tool_settings(environment))

    def file_writer(self, state: RunState) -> FileWriter:
        """Return what writes the settings into a checkpoint, from which models are exported too."""
        return lambda folder: self.settings.write(folder / TOKENIZER_FOLDER)

    def on_end(self, trainer: RayPPOTrainer) -> None:
        """Write the policy, in the engines' number format."""
        folder = Path(self.config.trainer.default_local_dir) / "model"
        trainer.ranks.save_policy(folder, self.dtype)
        copy_tokenizer(self.config.actor_rollout_ref.model.path, folder)
        self.settings.write(folder)


def hook(parts: Parts) -> Export | None:
    """Return the hook of a run that trains."""
    config = parts.config
    if config.trainer.val_only:
        return None
    return Export(config, parts.inputs.environment, parts.dtype)
