"""TRL's side of `benchmarks.rivals.curve`: a run of its GRPOTrainer on our dialogues.

TRL samples with its model's `generate` in a `rollout_func` that plays our dialogues (`lockstep`).
Advantages, padding, loss, optimizer and checkpoints are TRL's own. Needs an environment with TRL.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

from benchmarks.rivals.lockstep import Lockstep
from search_r1.agent.generation import build_agent, build_environment, build_format
from search_r1.scoring import build_reward_manager
from verl.config import Config, cli
from verl.data.columns import Columns
from verl.data.outside import strings_of_rows
from verl.data.prompts import load_prompts
from verl.data.sampler import PromptSampler
from verl.types import Origin, Prompt, Sampling, Trajectory, start_trajectory


class Dialogues:
    """Plays and scores our dialogues about the rows of a run's files."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        data, environment = config.data, build_environment(config)
        format = build_format(config, environment, tokenizer)
        wording = tokenizer, format.schemas, strings_of_rows(tokenizer, format.tags)
        columns = Columns.of_training(data)
        self.train = load_prompts(config, data.train_files, None, *wording, columns)
        self.val = load_prompts(config, data.val_files, None, *wording)
        self.agent, self.reward = build_agent(config), build_reward_manager(config)
        self.config = config

    def play(self, engine: Lockstep, prompts: list[Prompt], **how: float) -> list[Trajectory]:
        """Play one dialogue per prompt."""
        sampling = Sampling(self.config.data.max_response_length, **how)
        return engine.play(self.agent, [start_trajectory(p) for p in prompts], sampling)

    def greedy_em(self, engine: Lockstep) -> float:
        """Return the EM of the held-out questions, as our validation measures it."""
        rewards = self.reward(self.play(engine, self.val, temperature=0.0))
        return sum(reward.components["em"] for reward in rewards) / len(rewards)


class Curve(TrainerCallback):
    """Measures each step, and the EM of the held-out questions where it is due."""

    def __init__(self, out: Path, dialogues: Dialogues, test_freq: int) -> None:
        self.path, self.dialogues, self.test_freq = out / "curve.jsonl", dialogues, test_freq
        self.engine: Any = None
        self._began = 0.0, 0.0
        self._row: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure the policy that training starts from."""
        if state.global_step == 0:
            self._write({"step": 0, "em": self.dialogues.greedy_em(self.engine)})

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clocks, before sampling."""
        self._began = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop the clocks after the optimizer step, and validate."""
        wall, cpu = self._began
        row = {"step": state.global_step, "wall": time.perf_counter() - wall,
               "cpu": time.process_time() - cpu, "load": os.getloadavg()[0]}  # fmt: skip
        if state.global_step % self.test_freq == 0:
            row["em"] = self.dialogues.greedy_em(self.engine)
        self._row = row

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        """Write the step with TRL's metrics of it."""
        if "reward" in logs:
            self._write({**self._row, "score": logs["reward"], "grad_norm": logs["grad_norm"]})

    def _write(self, row: dict[str, float]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def as_trl(trajectories: list[Trajectory], scores: list[float]) -> dict[str, Any]:
    """Return what TRL expects of a `rollout_func`: ids, and a mask of the policy's tokens."""
    columns: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "env_mask": []}
    for trajectory in trajectories:
        first, *rest = trajectory.segments
        columns["prompt_ids"].append(list(first.ids))
        columns["completion_ids"].append([token for segment in rest for token in segment.ids])
        columns["env_mask"].append(
            [int(segment.origin is Origin.POLICY) for segment in rest for _ in segment.ids]
        )
    return {**columns, "logprobs": None, "score": scores}


def trainer_options(work: dict[str, Any], config: Config, out: Path) -> GRPOConfig:
    """Return TRL's options for the run that `config` describes."""
    actor, group = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n_agent
    size = config.data.train_batch_size * group
    return GRPOConfig(
        output_dir=str(out), report_to="none", disable_tqdm=True, use_cpu=True, bf16=False,
        logging_steps=1, save_strategy="steps", save_steps=work["test_freq"], save_total_limit=1,
        max_steps=work["steps"], seed=config.trainer.seed, shuffle_dataset=False,
        per_device_train_batch_size=work["micro"], num_generations=group,
        gradient_accumulation_steps=size // work["micro"], gradient_checkpointing=False,
        loss_type="dapo", beta=0.0, epsilon=actor.clip_ratio, learning_rate=actor.optim.lr,
        weight_decay=actor.optim.weight_decay, lr_scheduler_type="constant",
        max_grad_norm=actor.grad_clip, model_init_kwargs={"dtype": "float32"},
        temperature=config.actor_rollout_ref.rollout.temperature, max_completion_length=4096,
    )  # fmt: skip


def main() -> None:
    """Train as the JSON file named on the command line says, from the last checkpoint if any."""
    work = json.loads(Path(sys.argv[1]).read_text())
    config, out = cli.compose(work["options"]), Path(work["out"])
    torch.set_num_threads(work["threads"])
    model = config.actor_rollout_ref.model.path
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    dialogues = Dialogues(config, tokenizer)
    sampler = PromptSampler(
        len(dialogues.train), config.data.train_batch_size, seed=config.trainer.seed
    )
    order = [row for _ in range(work["steps"]) for row in sampler.next_batch()]
    curve, rollout = Curve(out, dialogues, work["test_freq"]), config.actor_rollout_ref.rollout

    def play(prompts: list[str], _: GRPOTrainer) -> dict[str, Any]:
        chosen = [dialogues.train[int(row)] for row in prompts]
        how = {"temperature": rollout.temperature, "top_p": rollout.top_p}
        trajectories = dialogues.play(curve.engine, chosen, **how)
        return as_trl(trajectories, [r.score for r in dialogues.reward(trajectories)])

    trainer = GRPOTrainer(
        model, lambda completions, score, **_: score, trainer_options(work, config, out),
        train_dataset=Dataset.from_dict({"prompt": [str(row) for row in order]}),
        processing_class=tokenizer, rollout_func=play, callbacks=[curve],
    )  # fmt: skip
    curve.engine = Lockstep(trainer.model, tokenizer)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(out)))
    trainer.save_model(str(out / "model"))


if __name__ == "__main__":
    main()
