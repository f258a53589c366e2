"""Checks that a run survives the death of an engine core during generation."""

import contextlib
import subprocess
import time
import urllib.request

import psutil
import torch

from scripts.gpu_checks.report import Report
from scripts.gpu_checks.runner import stop_tree
from scripts.gpu_checks.train import GRPO, Recipe, check_metrics, world

STEPS = 3
MAX_LEAK_MIB = 256.0


def check(report: Report) -> None:
    """Kill the engine core of a GRPO run after its first step; device memory must not leak."""
    report.need_vllm()
    before = used_mib() if report.on_card else 0.0
    with world(report) as inputs:
        options = ["actor_rollout_ref.rollout.engine_kwargs.enforce_eager=true"]
        recipe = Recipe(inputs, report.device, report.folder / "run", GRPO, options=options)
        process = recipe.start(STEPS)
        try:
            kill_in_generation(process, recipe)
            code = process.wait()
        finally:
            if process.poll() is None:
                stop_tree(process.pid)
    report.expect("exit_status", code, equal=0)
    rows = recipe.rows()
    check_metrics(report, "run", rows, list(range(1, STEPS + 1)))
    report.expect("replica_restarts", rows[-1]["fault/replica_restarts"], equal=1)
    if report.on_card:
        report.expect("memory_left_mib", used_mib() - before, below=MAX_LEAK_MIB)


def kill_in_generation(process: subprocess.Popen[bytes], recipe: Recipe) -> None:
    """Kill the engine core once a search of the second step has reached the retriever."""
    while not recipe.rows():
        assert process.poll() is None, "the run ended before its first step"
        time.sleep(0.05)
    before = requests(recipe.world.url)
    while requests(recipe.world.url) == before:
        assert process.poll() is None, "the run ended before it searched again"
        time.sleep(0.005)
    cores = [p for p in psutil.Process(process.pid).children(recursive=True) if is_core(p)]
    assert cores, "no process of the run is called EngineCore"
    cores[0].kill()


def requests(url: str) -> str:
    """Return the retriever's metrics that count its requests."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return " ".join(line for line in lines if line.startswith("retriever_requests_total"))


def is_core(process: psutil.Process) -> bool:
    """Return whether a process is vLLM's engine core."""
    with contextlib.suppress(psutil.Error):
        return "EngineCore" in f"{process.name()} {' '.join(process.cmdline())}"
    return False


def used_mib() -> float:
    """Return the device memory in use by all processes."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20
