"""An engine core that is killed while it generates: replaced, and the run goes on."""

from __future__ import annotations

import contextlib
import subprocess
import time
import urllib.request

import psutil
import torch

from scripts.gpu_checks.report import Report
from scripts.gpu_checks.runner import stop_tree
from scripts.gpu_checks.train import GRPO, Recipe, judge, world

STEPS = 3
LEFT_MIB = 256.0


def check(report: Report) -> None:
    """GRPO whose engine core dies after the first step; no memory of the card stays behind."""
    before = used_mib() if report.on_card else 0.0
    with world(report) as found:
        options = ["actor_rollout_ref.rollout.enforce_eager=true"]
        recipe = Recipe(found, report.device, report.folder / "run", GRPO, options=options)
        process = recipe.start(STEPS)
        try:
            kill_in_generation(process, recipe)
            code = process.wait()
        finally:
            if process.poll() is None:
                stop_tree(process.pid)
    report.expect("exit_status", code, equal=0)
    rows = recipe.rows()
    judge(report, "run", rows, list(range(1, STEPS + 1)))
    report.expect("replica_restarts", rows[-1]["fault/replica_restarts"], equal=1)
    if report.on_card:
        report.expect("memory_left_mib", used_mib() - before, below=LEFT_MIB)


def kill_in_generation(process: subprocess.Popen[bytes], recipe: Recipe) -> None:
    """Kill the engine core when a search of the second step has arrived at the retriever."""
    while not recipe.rows():
        assert process.poll() is None, "the run ended before its first step"
        time.sleep(0.05)
    asked = requests(recipe.world.url)
    while requests(recipe.world.url) == asked:
        assert process.poll() is None, "the run ended before it searched again"
        time.sleep(0.005)
    cores = [p for p in psutil.Process(process.pid).children(recursive=True) if is_core(p)]
    assert cores, "no process of the run is called EngineCore"
    cores[0].kill()


def requests(url: str) -> str:
    """The retriever's count of the searches it was asked for."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return " ".join(line for line in lines if line.startswith("retriever_requests_total"))


def is_core(process: psutil.Process) -> bool:
    """Whether it is vLLM's engine core."""
    with contextlib.suppress(psutil.Error):
        return "EngineCore" in f"{process.name()} {' '.join(process.cmdline())}"
    return False


def used_mib() -> float:
    """Memory of the card that anybody holds."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20
