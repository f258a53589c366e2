"""Replaces the trainer (`ENTRY`) in tests of the shell scripts around it.

It behaves like the trainer: options as key=value, a checkpoint folder and exit status 75 after
SIGUSR1 or SIGTERM, steps that continue from the newest checkpoint. It misbehaves on request.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LAST_STEP = 3


def newest(folder: Path) -> int:
    return max((int(path.name.split("_")[-1]) for path in folder.glob("global_step_*")), default=0)


def say(text: str) -> None:
    sys.stdout.write(f"stand-in: {text}\n")
    sys.stdout.flush()


def main() -> int:
    """Run until a signal, unless all steps but the last are done."""
    options = dict(option.split("=", 1) for option in sys.argv[1:])
    folder = Path(options["trainer.default_local_dir"])
    step = newest(folder) + 1

    signals: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append(number))
    if "STAND_IN_LEAVES" in os.environ:  # a process that nobody but its mark knows
        subprocess.Popen(["sleep", "4321"], start_new_session=True)
    say(
        f"step {step} {options['trainer.resume_mode']} nodes={options['trainer.nnodes']} "
        f"ray={os.environ.get('RAY_ADDRESS')} retriever={options['retriever.url']} "
        f"end={os.environ.get('SLURM_JOB_END_TIME')}"
    )
    if "STAND_IN_STATUS" in os.environ:
        return int(os.environ["STAND_IN_STATUS"])
    while step < LAST_STEP and not signals:
        time.sleep(0.1)
    if not signals:
        return 0
    if "STAND_IN_SAVES_NOTHING" not in os.environ:
        (folder / f"global_step_{step}").mkdir()
    say(f"signal {signals[0]}, saved step {step}")
    return 75


if __name__ == "__main__":
    sys.exit(main())
