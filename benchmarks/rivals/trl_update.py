"""TRL's GRPOTrainer on given trajectories; runs in an environment that has TRL, and only there.

The trajectories come from a `rollout_func`, which hands them over at once with an `env_mask`: all
that follows is TRL's own, padding and advantages included. The clocks run from there to the end of
its optimizer step.
"""

from __future__ import annotations

import json
import tempfile
from typing import Any

import trl.trainer.utils
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.rivals.turns import Turns, arguments


class Clocks(TrainerCallback):
    """Stops the turn with the optimizer step, and answers with the norm that TRL logs."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """After the optimizer step."""
        self.turns.stop()

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        """After the metrics of the step."""
        self.turns.answer(grad_norm=float(logs["grad_norm"]), loss=float(logs["loss"]))


def options(out: str, micro: int, size: int, group: int, lr: float, **more: Any) -> GRPOConfig:
    """TRL's of an update of `size` trajectories; autocast to bfloat16 is its default."""
    return GRPOConfig(
        output_dir=out, report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
        max_steps=1_000_000, use_cpu=True, bf16=True, gradient_checkpointing=False,
        per_device_train_batch_size=micro, gradient_accumulation_steps=size // micro,
        num_generations=group, loss_type="dapo", beta=0.0, learning_rate=lr,
        lr_scheduler_type="constant", max_grad_norm=1.0, shuffle_dataset=False, **more,
    )  # fmt: skip


def main() -> None:
    """Train on what the turns ask for."""
    given = arguments(("--lr", float))
    turns, work = Turns(), json.loads(given.work.read_text())

    def recorded(prompts: list[Any], _: GRPOTrainer) -> dict[str, Any]:
        rows = work[turns.wait()]
        # On a GPU its head scores the completions alone, elsewhere every position.
        trl.trainer.utils._use_triton = lambda _: bool(turns.way)
        assert len(rows) == len(prompts), f"got {len(prompts)} prompts, expected {len(rows)}"
        return {
            "prompt_ids": [row["prompt"] for row in rows],
            "completion_ids": [row["response"] for row in rows],
            "logprobs": None,
            "env_mask": [row["mask"] for row in rows],
            "score": [row["score"] for row in rows],
        }

    def reward(completions: list[str], score: list[float], **_: Any) -> list[float]:
        return score

    size = len(work[0])
    group = sum(row["group"] == work[0][0]["group"] for row in work[0])
    with tempfile.TemporaryDirectory() as out:
        config = options(
            out, given.micro, size, group, given.lr, max_completion_length=4096,
            model_init_kwargs={"dtype": "float32"},
        )  # fmt: skip
        GRPOTrainer(
            given.model, reward, config, rollout_func=recorded,
            train_dataset=Dataset.from_dict({"prompt": [f"question {i}" for i in range(size)]}),
            processing_class=AutoTokenizer.from_pretrained(given.model, padding_side="left"),
            callbacks=[Clocks(turns)],
        ).train()  # fmt: skip


if __name__ == "__main__":
    main()
