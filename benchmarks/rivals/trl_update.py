"""TRL's GRPOTrainer on recorded trajectories; needs an environment with TRL.

A `rollout_func` returns the recorded trajectories with an `env_mask`. Everything after it is TRL's
own code, including padding and advantages. The measured time goes from there to the end of the
optimizer step.
"""

from __future__ import annotations

import json
import tempfile
from typing import Any

import trl.trainer.utils
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.rivals.tasks import TaskPipe, parse_arguments


class UpdateTasks(TrainerCallback):
    """Ends the measured time after the optimizer step, and answers with the metrics TRL logs."""

    def __init__(self, pipe: TaskPipe) -> None:
        self.pipe = pipe

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clocks, after the optimizer step."""
        self.pipe.stop()

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        """Answer with the metrics of the step."""
        self.pipe.answer(grad_norm=float(logs["grad_norm"]), loss=float(logs["loss"]))


def build_config(out: str, micro: int, size: int, group: int, lr: float, **more: Any) -> GRPOConfig:
    """Return TRL's options for updates of `size` trajectories in micro-batches of `micro`."""
    return GRPOConfig(
        output_dir=out, report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
        max_steps=1_000_000, use_cpu=True, bf16=True, gradient_checkpointing=False,
        per_device_train_batch_size=micro, gradient_accumulation_steps=size // micro,
        num_generations=group, loss_type="dapo", beta=0.0, learning_rate=lr,
        lr_scheduler_type="constant", max_grad_norm=1.0, shuffle_dataset=False, **more,
    )  # fmt: skip


def main() -> None:
    """Train on the recorded trajectories of each task."""
    args = parse_arguments(("--lr", float))
    pipe, work = TaskPipe(), json.loads(args.work.read_text())

    def recorded_rollout(prompts: list[Any], _: GRPOTrainer) -> dict[str, Any]:
        rows = work[pipe.wait()]
        # On a GPU, TRL computes logits only for the completions, elsewhere for every position.
        trl.trainer.utils._use_triton = lambda _: bool(pipe.mode)
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
        config = build_config(
            out, args.micro, size, group, args.lr, max_completion_length=4096,
            model_init_kwargs={"dtype": "float32"},
        )  # fmt: skip
        GRPOTrainer(
            args.model, reward, config, rollout_func=recorded_rollout,
            train_dataset=Dataset.from_dict({"prompt": [f"question {i}" for i in range(size)]}),
            processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
            callbacks=[UpdateTasks(pipe)],
        ).train()  # fmt: skip


if __name__ == "__main__":
    main()
