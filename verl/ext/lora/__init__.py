"""LoRA: policy and critic train an adapter on a frozen base (`lora_rank` of a model's options)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from verl.agent.settings import copy_settings
from verl.trainer.hooks import Hook

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer


class AdapterExport(Hook):
    """Writes the policy's adapter to `adapter/` below the run's folder at the end of a run."""

    def __init__(self, directory: Path) -> None:
        """`directory`: the run's folder."""
        self.folder = directory.absolute() / "adapter"

    def on_end(self, trainer: RayPPOTrainer) -> None:
        """Write it as a peft folder, beside the merged `model/`."""
        trainer.ranks.group.call("roles.save_adapter", str(self.folder))
        copy_settings(self.folder.with_name("model"), self.folder)


def hook(parts: Parts) -> AdapterExport | None:
    """Return the hook of a run that trains an adapter."""
    config = parts.config
    has_adapter = config.actor_rollout_ref.model.has_adapter
    return AdapterExport(parts.directory) if has_adapter and not config.trainer.val_only else None
