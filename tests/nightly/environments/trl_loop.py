"""A step of TRL's GRPO on our task, as a user of TRL and OpenEnv writes it; prints what it saw."""

import functools
import json
import re
import sys
import tempfile
from typing import Any

import pandas
import torch
from datasets import Dataset
from openenv import GenericEnvClient
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from benchmarks.rivals.trl_step import CHAT_TEMPLATE, RESPONSE_TEMPLATE

MODEL, DATA = "example/policy", "example/data/train.parquet"
NUM_QUESTIONS, GROUP = 4, 8
played: list[float] = []
"""The reward of each episode."""
searches: list[str] = []


class SearchTask:
    """A session of the server, with its search as TRL's tool."""

    def __init__(self) -> None:
        self.client = GenericEnvClient(base_url=sys.argv[1]).sync()
        self.client.connect()

    def reset(self, question: str, answers: list[str], **_: Any) -> None:
        self.client.reset(question=question, ground_truth=answers)

    def search(self, query: str) -> str:
        """Finds documents.

        Args:
            query: What to look for.

        Returns:
            The documents.
        """
        searches.append(query)
        found = self._call("search", query=query).observation["result"]
        lines = [f"Doc {n}(Title: {d['title']}) {d['text']}" for n, d in enumerate(found, 1)]
        return "\n\n<information>" + "\n".join(lines) + "</information>\n\n"

    def _call(self, name: str, **arguments: str) -> Any:
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        return self.client.step(action)


def answered(completions: list[Any], environments: list[SearchTask], **_: Any) -> list[float]:
    """End each episode with its answer; the environment scores it."""
    for messages, environment in zip(completions, environments, strict=True):
        found = re.findall(r"<answer>([\s\S]*?)</answer>", messages[-1]["content"])
        end = environment._call("answer", answer=found[-1] if found else "")
        assert end.done
        played.append(end.reward)
    return played[-len(completions) :]


def main() -> None:
    """Train for one step."""
    rows = pandas.read_parquet(DATA)[:NUM_QUESTIONS]
    data = {
        "prompt": [
            [{"role": "user", "content": row[0]["content"] + "\n"}] for row in rows["prompt"]
        ],
        "question": [info["question"] for info in rows["extra_info"]],
        "answers": [list(model["ground_truth"]["target"]) for model in rows["reward_model"]],
    }
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = {
        **RESPONSE_TEMPLATE,
        "start_anchor_pattern": r"\n|</information>\s*",
    }
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    # `generate` needs the tokenizer to find stop strings, and TRL does not pass it.
    model.generate = functools.partial(model.generate, tokenizer=tokenizer)
    with tempfile.TemporaryDirectory() as out:
        options = GRPOConfig(
            output_dir=out, report_to="none", save_strategy="no", logging_steps=1, max_steps=1,
            disable_tqdm=True, use_cpu=True, bf16=False, gradient_checkpointing=False, beta=0.0,
            per_device_train_batch_size=NUM_QUESTIONS * GROUP, num_generations=GROUP, seed=0,
            max_completion_length=400, max_tool_calling_iterations=3,
            generation_kwargs={
                "max_new_tokens": 48, "stop_strings": ["</search>", "</answer>"],
            },
        )  # fmt: skip
        trainer = GRPOTrainer(
            model, answered, options, Dataset.from_dict(data), processing_class=tokenizer,
            environment_factory=SearchTask,
        )  # fmt: skip
        trainer.train()
    logged = next(log for log in trainer.state.log_history if "reward" in log)
    seen = {"episodes": len(played), "rewards": played, "searches": len(searches)}
    print(json.dumps({**seen, "reward": logged["reward"], "grad_norm": logged["grad_norm"]}))  # noqa: T201


if __name__ == "__main__":
    main()
