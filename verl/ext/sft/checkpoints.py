"""Checkpoints of supervised training: every `save_freq` steps, resumed by the same command.

They lie beside the output folder, in `OUTPUT_DIR.checkpoints/global_step_N`, with the files of an
RL run's checkpoints (`verl.checkpoint`), so that `python -m verl.checkpoint export` reads them.
The position in the data follows from the step and the seed. All are kept.
"""

import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PretrainedConfig

from verl.checkpoint import folders
from verl.checkpoint.contents import check_files
from verl.checkpoint.saver import is_due
from verl.errors import ConfigError, SaveError, explain
from verl.ext.sft.options import SftConfig
from verl.files import sha256
from verl.model_files import weights_fingerprint
from verl.training.checkpoint_files import checkpoint_errors
from verl.training.fsdp import FsdpModel
from verl.training.shards import load_shards, save_shards

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Checkpoints:
    """Saves and resumes one run; all ranks make the same calls. The first rank holds the lock."""

    def __init__(self, config: SftConfig, is_first: bool) -> None:
        """Look for a checkpoint to resume. Raises ConfigError if its settings are others."""
        self.frequency, self.total_steps = config.save_freq, config.steps
        output = Path(config.output_dir).absolute()
        self.root = output.with_name(output.name + ".checkpoints")
        self._settings: dict[str, Any] = {}
        self._latest: Path | None = None
        if not is_first:
            return
        self._latest = folders.latest(self.root)
        if not self.frequency:
            if self._latest is not None:
                logger.warning("%s is not resumed, since save_freq=0", self._latest)
            self._latest = None
            return
        self._settings = settings(config)
        folders.clean_up(self.root)
        self._latest = folders.latest(self.root)
        if self._latest is not None:
            check_same(self._latest, config)

    def resume(self, model: FsdpModel) -> int:
        """Load the newest checkpoint, if there is one; return the number of finished steps."""
        folder = shared(self._latest)
        if folder is None:
            return 0
        load_shards(folder, {"actor": model})
        step = folders.step_of(folder)
        if dist.get_rank() == 0:
            logger.info("resumed from %s: %d of %d steps are done", folder, step, self.total_steps)
        return step

    def save(self, step: int, model: FsdpModel, model_config: PretrainedConfig) -> None:
        """Write a checkpoint if one is due after `step`. Raises SaveError on every rank."""
        if not is_due(self.frequency, step, self.total_steps):
            return
        pending, problem = None, ""
        if dist.get_rank() == 0:
            try:
                pending = folders.begin(self.root, step)
                folders.write_state(pending.folder, {"step": step, "settings": self._settings})
            except OSError as error:
                problem = str(error)
        folder = shared(None if problem or pending is None else pending.folder)
        if folder is not None:
            problem = save_shards(folder, {"actor": model}, model_config)
        problems: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        if pending is not None and not any(problems):
            try:
                folders.publish(pending)
            except OSError as error:
                problems[0] = str(error)
        problem = shared(next(filter(None, problems), ""))
        if problem:
            if pending is not None:
                folders.discard(pending)
            fix = "make room there; the same command continues from the checkpoint before"
            subject = f"checkpoint of step {step}"
            raise SaveError(explain(subject, problem, f"{self.root} to be writable", fix))


def shared(value: Any) -> Any:
    """Return the first rank's value on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def settings(config: SftConfig, saved: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what a resumed run may not change: options, and the contents of files.

    Fingerprints of weights have the form of those in `saved`.
    """
    fixed = [f.name for f in fields(config) if f.metadata["limits"].resume != "free"]
    found: dict[str, Any] = {name: getattr(config, name) for name in fixed}
    model, rows = Path(config.model_path), Path(config.train_file)
    for name in ("model_path", "adapter_path"):
        path = getattr(config, name)
        found[name] = path and weights_fingerprint(path, (saved or {}).get(name))
    found["train_file"] = sha256(rows)[:16] if rows.is_file() else "no such file"
    found["tokenizer"] = [
        sha256(model / name)[:16] if (model / name).is_file() else "" for name in TOKENIZER_FILES
    ]
    return found


def check_same(folder: Path, config: SftConfig) -> None:
    """Raise ConfigError that names the settings which differ from a checkpoint's."""
    with checkpoint_errors(folder / folders.STATE_FILE):
        saved = dict(folders.read_state(folder)["settings"])
        present = settings(config, saved)
    names = [name for name in present if saved.get(name) != present[name]]
    if names:
        got, expected = (", ".join(f"{n}={x.get(n)}" for n in names) for x in (present, saved))
        fix = f"give the same settings, name another output_dir, or delete {folder.parent}"
        raise ConfigError(explain("resumed run", got, f"{expected}, as in {folder}", fix))
    check_files(folder)
