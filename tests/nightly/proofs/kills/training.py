"""A run of the real trainer on the example, started by the same command as often as needed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.algorithms.runner import DATA, ROOT
from benchmarks.algorithms.variants import COMMON
from tests.compare import read_rows
from tests.nightly.proofs.kills.processes import Family
from tests.nightly.proofs.kills.schedule import Victim

RESUMED = re.compile(r"resumed from (\S+)")
COMPLETE = "COMPLETE"

OPTIONS = (
    *COMMON,
    "algorithm.adv_estimator=gae",
    "algorithm.kl_ctrl.kl_coef=0.001",
    "algorithm.kl_ctrl.type=adaptive",
    "critic.optim.lr=1e-4",
    "critic.model.enable_gradient_checkpointing=false",
    "data.train_batch_size=8",
    "data.val_data_num=8",
    "data.val_batch_size=8",
    "max_turns=2",
    "data.max_response_length=32",
    "actor_rollout_ref.rollout.n_agent=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.n_gpus_per_node=2",
    "trainer.deterministic=true",
    "trainer.resume_mode=auto",
    "trainer.max_restarts=1000",
    "trainer.save_freq=1",
    "trainer.test_freq=5",
)
"""PPO on two ranks, with everything that a checkpoint stores: critic, KL controller, schedules."""


def command(folder: Path, base: Path, url: str, num_steps: int, extra: Sequence[str]) -> list[str]:
    """Return the command of a run in `folder`, from the policy `base`, that searches at `url`."""
    return [
        sys.executable, "-m", "verl.trainer.main_ppo", *OPTIONS,
        f"actor_rollout_ref.model.path={base}",
        f"data.train_files={DATA / 'train.parquet'}",
        f"data.val_files={DATA / 'val.parquet'}",
        f"retriever.url={url}",
        f"trainer.default_local_dir={folder}",
        f"trainer.total_training_steps={num_steps}",
        *extra,
    ]  # fmt: skip


@dataclass
class Training:
    """A run in `folder`, over all starts of its command."""

    folder: Path
    command: Sequence[str]
    """The command of every start."""
    patience: float = 300.0
    """Maximum seconds until its next step, or its end."""
    starts: int = 0
    """Number of starts so far."""
    process: subprocess.Popen[bytes] | None = None
    family: Family | None = None
    relatives: list[Family] = field(default_factory=list)
    """The processes of each start."""
    known_rows: list[dict[str, float | None]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Bytes of the files that the known rows were read from."""
    num_rows: int = 0
    row_time: float = 0.0
    row_start: int = 0

    def start(self) -> None:
        """Run the command; its output goes to `start_N.log`."""
        self.starts += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with self.log_path(self.starts).open("wb") as log:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        self.family = Family(self.process.pid)
        self.relatives.append(self.family)

    def log_path(self, start: int) -> Path:
        """Return the path of a start's output."""
        return self.folder / f"start_{start}.log"

    @property
    def status(self) -> int | None:
        """Exit status of the current start; None while it runs."""
        assert self.process is not None, "call start() first"
        return self.process.poll()

    def find(self, victim: Victim) -> list[psutil.Process]:
        """Return the run's current processes of a kind."""
        assert self.family is not None, "call start() first"
        return self.family.find(victim)

    def rows(self) -> list[dict[str, float | None]]:
        """Return the metrics logged so far; rows of repeated steps come first."""
        paths = [self.folder / name for name in ("metrics.superseded.jsonl", "metrics.jsonl")]
        sizes = [path.stat().st_size if path.exists() else 0 for path in paths]
        if sizes != self.sizes:  # this is called many times per second
            self.known_rows = [row for path in paths for row in read_rows(path)]
            self.sizes = sizes
        rows = self.known_rows
        if len(rows) > self.num_rows:
            self.num_rows, self.row_time, self.row_start = len(rows), time.monotonic(), self.starts
        return list(rows)

    def last_step(self) -> int:
        """Return the last logged step; 0 before the first."""
        rows = self.rows()
        return int(rows[-1]["step"] or 0) if rows else 0

    def since_row(self) -> float | None:
        """Return the seconds since the last row appeared; None if that was before this start."""
        return time.monotonic() - self.row_time if self.row_start == self.starts else None

    def is_saving(self) -> bool:
        """Whether a checkpoint is half written."""
        return any(self.folder.glob("global_step_*.tmp"))

    def complete(self) -> set[str]:
        """Return the names of complete checkpoints, without those not renamed yet."""
        names = {path.parent.name for path in self.folder.glob(f"global_step_*/{COMPLETE}")}
        return {name for name in names if not name.endswith(".tmp")}

    def resumed(self) -> list[str]:
        """Return the names of the checkpoints that were resumed from, over all starts."""
        logs = [self.log_path(start) for start in range(1, self.starts + 1)]
        names = [name for log in logs for name in RESUMED.findall(log.read_text(errors="replace"))]
        return [Path(name).name for name in names]

    def stop(self) -> None:
        """Kill all processes that are still running."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        for family in self.relatives:
            family.end()
