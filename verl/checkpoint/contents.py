"""Whether a checkpoint can be started from, looked at before anything long begins."""

from __future__ import annotations

from pathlib import Path

from verl.checkpoint import ahead, folders
from verl.checkpoint.state import DRIVER_FILE, RunState
from verl.config import Config
from verl.errors import ModelError
from verl.training.shards import folders_of, rank_file, read_adapters
from verl.training.stored import ShardReader, read_states


def check_contents(config: Config) -> None:
    """Read all but the tensors of what a run starts from, if anything.

    Raises ModelError, which names an earlier checkpoint.
    """
    root = Path(config.trainer.default_local_dir)
    step_dir = folders.resolve(config.trainer.resume_mode, root)
    if step_dir is None:
        return
    try:
        folders.refuse_changes(step_dir)
        RunState.read(step_dir)
        ahead.read(step_dir)
        read_adapters(step_dir)
        if (step_dir / DRIVER_FILE).exists():
            read_states(step_dir / DRIVER_FILE)
        for folder in folders_of(step_dir):
            read_states(rank_file(folder, 0))
            ShardReader(folder / "shards").read_metadata()
    except ModelError as error:
        step = folders.step_of(step_dir)
        earlier = [p for p in folders.all_complete(step_dir.parent) if folders.step_of(p) < step]
        advice = f" (trainer.resume_mode={earlier[-1]})" if earlier else ""
        raise ModelError(f"{error}{advice}") from error
