"""Writes the trained policy as a Hugging Face folder, with what its dialogues need."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from verl.agent.environment import Environment
from verl.agent.wording import TEMPLATE_FILE, is_file
from verl.config import Config
from verl.config.agent import AgentConfig
from verl.trainer.hooks import Hook
from verl.training.weights import copy_tokenizer

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer


class Export(Hook):
    """Writes `model/` below the run's folder at the end of a run."""

    def __init__(self, config: Config, environment: Environment, dtype: str) -> None:
        """`environment`: the agents' tools, which are described in the exported model."""
        self.config, self.environment, self.dtype = config, environment, dtype

    def on_end(self, trainer: RayPPOTrainer) -> None:
        """Write the policy, in the engines' number format."""
        directory = Path(self.config.trainer.default_local_dir)
        model = self.config.actor_rollout_ref.model
        folder, ranks = directory / "model", trainer.ranks
        ranks.save_policy(folder, self.dtype)
        copy_tokenizer(model.path, folder)
        template = self.config.template
        if is_file(template):
            shutil.copyfile(template, folder / TEMPLATE_FILE)
            template = TEMPLATE_FILE
        dialogue = {
            "template": template,
            "tools": list(self.config.agent.tools),
            "max_turns": self.config.max_turns,
            "chat_template_kwargs": dict(self.config.data.chat_template_kwargs),
            **self.environment.settings(),
        }
        if self.config.agent.name != AgentConfig().name and ":" not in self.config.agent.name:
            dialogue["agent"] = self.config.agent.name
        (folder / "search_r1.json").write_text(json.dumps(dialogue) + "\n")


def hook(parts: Parts) -> Export | None:
    """Return the hook of a run that trains."""
    config = parts.config
    if config.trainer.val_only:
        return None
    return Export(config, parts.inputs.environment, parts.dtype)
