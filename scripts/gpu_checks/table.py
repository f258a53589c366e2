"""The checks by name, in the order in which all of them run, and their time limits."""

import importlib
from dataclasses import dataclass

from scripts.gpu_checks.report import Report

LIMIT_FACTOR = 4
MIN_LIMIT_S = 120.0


@dataclass(frozen=True)
class Check:
    """One check: a function in a module of this package."""

    name: str
    module: str
    function: str
    seconds: float
    """Estimate for one large card, not measured yet."""
    about: str

    @property
    def limit(self) -> float:
        """Seconds after which the check is killed."""
        return max(MIN_LIMIT_S, LIMIT_FACTOR * self.seconds)

    def run(self, report: Report) -> None:
        """Run the check in this process."""
        module = importlib.import_module(f"{__package__}.{self.module}")
        getattr(module, self.function)(report)


ALL = [
    Check("environment", "environment", "check", 20, "driver, cards, versions, imports"),
    Check("attention", "attention", "check", 20, "packed kernels against one sequence at a time"),
    Check("trainer", "trainer", "check", 60, "ranks on the device against a CPU, each offload"),
    Check("checkpoint", "checkpoint", "check", 25, "saved in the background, resumed bit for bit"),
    Check("speed", "speed", "check", 120, "1.5B and 3B: TFLOP/s, tokens/s, memory by estimate"),
    Check("engine-graphs", "engine", "graphs", 120, "vLLM with CUDA graphs: all of the below"),
    Check("train-grpo", "train", "grpo", 150, "train_grpo.sh: 3 steps, then resumed"),
    Check("train-ipc", "train", "ipc", 80, "train_grpo.sh, weights by CUDA IPC on one card"),
    Check("engine-eager", "engine", "eager", 75, "vLLM: seeds, log-probs, reload, five sleeps"),
    Check("engine-float32", "engine", "float32", 75, "vLLM in float32 against the trainer"),
    Check("engine-adapter", "engine", "adapter", 75, "vLLM with a LoRA adapter"),
    Check("train-ppo", "train", "ppo", 120, "train_ppo.sh: 2 steps, then resumed"),
    Check("train-two", "train", "two_cards", 150, "train_grpo.sh on two cards"),
    Check("train-split", "train", "split_cards", 150, "train_grpo.sh, the engine on its own card"),
    Check("deaths", "deaths", "check", 120, "an engine core killed while it generates"),
]
CHECKS = {check.name: check for check in ALL}
