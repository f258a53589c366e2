"""A fake run without a model, with steps, checkpoints and processes to kill."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy
from safetensors.numpy import save_file

WAIT = """
import os, time
parent, engine = os.getppid(), None
{more}
while parent != 1 and os.getppid() == parent and (engine is None or engine.poll() is None):
    time.sleep(0.02)
"""
RANK = WAIT.format(more="")
START_ENGINE = f"""
import subprocess
engine = subprocess.Popen(["VLLM::EngineCore", "-c", {RANK!r}], executable={sys.executable!r})
"""
REPLICA = WAIT.format(more=START_ENGINE)
ORPHAN = "import time; time.sleep(100)"


def child(code: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["ray::ActorHost", "-c", code], executable=sys.executable)


def resume(folder: Path, loads_broken: bool) -> tuple[int, float]:
    """Return the step and value to resume from."""
    folders = [p for p in folder.glob("global_step_*") if loads_broken or (p / "COMPLETE").exists()]
    folders = [p for p in folders if loads_broken or p.suffix != ".tmp"]
    newest = max(folders, key=lambda p: int(p.stem.rpartition("_")[2]), default=None)
    if newest is None:
        return 0, 1.0
    sys.stdout.write(f"INFO: resumed from {newest}\n")
    state = newest / "state.json"
    step = int(newest.stem.rpartition("_")[2])
    return step, float(json.loads(state.read_text()) if state.exists() else 0.0)


def save(folder: Path, step: int, value: float) -> None:
    part = folder / f"global_step_{step}.tmp"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    time.sleep(0.15)
    (part / "state.json").write_text(json.dumps(value))
    (part / "COMPLETE").touch()
    shutil.rmtree(folder / f"global_step_{step}", ignore_errors=True)
    part.rename(folder / f"global_step_{step}")


def main(folder: Path, num_steps: int, fault: str) -> None:
    leaves_orphans, loads_broken = fault == "leaves_orphans", fault == "loads_broken"
    replica, rank = child(REPLICA), child(ORPHAN if leaves_orphans else RANK)
    try:
        step, value = resume(folder, loads_broken)
        while step < num_steps:
            time.sleep(0.1)
            step, value = step + 1, value * 1.1
            with (folder / "metrics.jsonl").open("a") as file:
                row = {"step": step, "value": value, "timing_s/step": 0.1}
                file.write(json.dumps(row) + "\n")
            save(folder, step, value)
            if replica.poll() is not None or rank.poll() is not None:
                os._exit(1)
        (folder / "model").mkdir(exist_ok=True)
        save_file({"value": numpy.array([value])}, folder / "model" / "model.safetensors")
    finally:
        replica.terminate()
        rank.terminate()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
