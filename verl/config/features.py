"""The files of optional features that options ask for; any of them may have been deleted.

A feature that no option asks for is left out by those who would call it (`verl.plugins.optional`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from verl.config import Config
from verl.config.data import BY_SCORE
from verl.errors import explain

PACKAGE = Path(__file__).parents[1] / "ext"
ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
CHECKPOINTING = "enable_gradient_checkpointing"
SERVERS = ("servers", "engines/remote.py")
GATED = ("gated.py", "turn_times.py")


@dataclass(frozen=True)
class Feature:
    """The files that an option needs; its default, 0, false, null and nothing need none."""

    option: str
    files: tuple[str, ...]
    """Files and folders below `verl/ext`."""
    value: Any = None
    """The only value, or item of the value, that needs them; None: every one."""
    is_read: Callable[[Config], bool] = lambda config: True
    """Whether the option has this meaning in a run."""

    def is_needed(self, value: Any, default: Any) -> bool:
        """Whether an option's value needs the files."""
        if self.value is None:
            return bool(value) and value != default
        return self.value in value if isinstance(value, list | dict) else self.value == value


FEATURES = (
    Feature("data.rollouts", ("recorded.py",)),
    Feature("data.weight_column", ("weighted.py",)),
    Feature("data.shuffle_train_dataloader", ("score_memory.py",), BY_SCORE),
    Feature("trainer.rollout_data_dir", ("record.py",)),
    Feature("trainer.trace", ("trace.py",)),
    Feature("trainer.time_limit", ("stopping.py", "early_end.py")),
    Feature("trainer.max_restarts", ("restart.py",)),
    Feature("trainer.resume_anyway", ("resume.py",)),
    Feature("trainer.guard.action", ("guard.py",), "stop"),
    Feature("trainer.guard.limits", ("guard.py",)),
    *(
        Feature("trainer.logger", (f"trackers/{name}.py",), name)
        for name in ("mlflow", "swanlab", "tensorboard", "trackio", "wandb")
    ),
    Feature("reward_model.stages", ("reward_stages.py",)),
    Feature("critic.n_gpus_per_node", ("critic_apart.py",)),
    Feature("critic.model.lora_rank", ("lora",)),
    Feature(f"critic.model.{CHECKPOINTING}", ("recompute.py",), "selective"),
    Feature(f"{MODEL}.lora_rank", ("lora",)),
    Feature(f"{MODEL}.{CHECKPOINTING}", ("recompute.py",), "selective"),
    Feature("actor_rollout_ref.actor.terms", ("sibling.py", "distillation.py"), "sibling"),
    Feature("actor_rollout_ref.actor.terms",
            ("teacher.py", "distillation.py", "engines/remote.py"), "teacher"),
    Feature("actor_rollout_ref.actor.ulysses_sequence_parallel_size", ("sequence_parallel.py",)),
    Feature(f"{ROLLOUT}.name", ("engines/remote.py",), "remote"),
    Feature(f"{ROLLOUT}.name",
            ("engines/transformers.py", "engines/context_cache.py", "engines/request.py",
             "engines/together.py"), "transformers"),
    Feature(f"{ROLLOUT}.url", SERVERS, is_read=lambda config: bool(config.placement.servers)),
    Feature(f"{ROLLOUT}.weight_sync", ("transports/ipc.py", "transports/stream.py"), "ipc"),
    Feature(f"{ROLLOUT}.weight_sync", ("transports/nccl.py", "transports/stream.py"), "nccl"),
    Feature(f"{ROLLOUT}.max_staleness",
            ("asynchrony.py", "ahead_files.py", "overlapping.py", "replay.py", *GATED)),
    Feature(f"{ROLLOUT}.replay", ("replay.py", *GATED)),
)  # fmt: skip
"""What may be asked for, with all files of `verl/ext` that it imports."""


def problems(config: Config) -> Iterator[str]:
    """Yield an error for each feature that the options ask for and that was deleted."""
    default = Config()
    for feature in FEATURES:
        read = attrgetter(feature.option)
        value = read(config)
        if not feature.is_needed(value, read(default)) or not feature.is_read(config):
            continue
        for file in feature.files:
            path = PACKAGE / file
            # Git leaves compiled files behind, and so the folder.
            if not (path if path.suffix else path / "__init__.py").exists():
                got = f"{value}, which needs verl/ext/{file}, which was deleted"
                fix = f"restore it (git checkout HEAD -- verl/ext/{file})"
                yield explain(feature.option, got, "a value without it", f"{fix}, or set another")
