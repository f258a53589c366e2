"""Whole steps of TRL's GRPOTrainer with a search tool; needs an environment with TRL.

TRL samples with transformers and runs its own tool loop and updates; no part of it is replaced. Its
dialogues have our format through three public settings: a chat template that renders messages as
our dialogues, a response template that parses `<search> query </search>` as a tool call, and stop
strings. The end-of-sequence token that TRL requires after a turn is one additional token.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import tempfile
import urllib.request
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOTrainer

from benchmarks.rivals.tasks import TaskPipe, parse_arguments
from benchmarks.rivals.trl_update import build_config

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"<\|im_start\|>assistant\n|</information>\s*",
    "fields": {
        "tool_calls": {
            "open": "<search>", "close_pattern": r"</search>\s*", "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "search", "arguments": {"query": "{content}"}},
            },
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}  # fmt: skip


class StepTasks(TrainerCallback):
    """Runs one step per task, measured from before sampling to after the optimizer step."""

    def __init__(self, pipe: TaskPipe) -> None:
        self.pipe = pipe

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait for a task, before sampling."""
        self.pipe.wait()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clocks, after the optimizer step."""
        self.pipe.stop()

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        """Answer with the metrics of the step."""
        self.pipe.answer(
            grad_norm=float(logs["grad_norm"]), score=float(logs["reward"]),
            sampled=float(logs["completions/mean_length"]),
            searches=float(logs["tools/call_frequency"]),
        )  # fmt: skip


def search_tool(url: str, tokenizer: Any, max_tokens: int) -> Any:
    """Return the search tool, which TRL calls concurrently for all dialogues of a turn."""

    def fetch(query: str) -> str:
        body = json.dumps({"queries": [query], "topk": 1, "return_scores": True}).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            hits = json.load(response)["result"][0]
        documents = (hit["document"]["contents"].partition("\n") for hit in hits)
        text = "".join(
            f"Doc {rank}(Title: {title}) {rest}\n"
            for rank, (title, _, rest) in enumerate(documents, 1)
        )
        ids = tokenizer(text)["input_ids"][:max_tokens]
        return f"\n\n<information>{tokenizer.decode(ids)}</information>\n\n"

    async def search(query: str) -> str:
        """Finds documents.

        Args:
            query: What to look for.

        Returns:
            The documents.
        """
        return await asyncio.to_thread(fetch, query)

    return search


def exact_match(completions: list[Any], answers: list[list[str]], **_: Any) -> list[float]:
    """Score 1 if the last answer is one of the expected answers, ignoring case, else 0."""
    scores = []
    for messages, expected in zip(completions, answers, strict=True):
        predicted = re.findall(r"<answer>([\s\S]*?)</answer>", messages[-1]["content"])
        gold = {text.strip().lower() for text in expected}
        scores.append(float(bool(predicted) and predicted[-1].strip().lower() in gold))
    return scores


def main() -> None:
    """Train on the prompts in order, one step per task."""
    args = parse_arguments(("--url", str))
    pipe, work = TaskPipe(), json.loads(args.work.read_text())
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    # `generate` needs the tokenizer to find stop strings, and TRL does not pass it.
    model.generate = functools.partial(model.generate, tokenizer=tokenizer)
    rows = {
        "prompt": [[{"role": "user", "content": text}] for text in work["prompts"]],
        "answers": work["answers"],
    }
    with tempfile.TemporaryDirectory() as out:
        config = build_config(
            out, args.micro, work["step_size"], work["group"], work["lr"],
            max_completion_length=work["max_length"], max_tool_calling_iterations=work["max_turns"],
            generation_kwargs={
                "max_new_tokens": work["turn_length"], "stop_strings": ["</search>", "</answer>"],
            },
        )  # fmt: skip
        GRPOTrainer(
            model, exact_match, config, Dataset.from_dict(rows), processing_class=tokenizer,
            tools=[search_tool(args.url, tokenizer, work["observation_length"])],
            callbacks=[StepTasks(pipe)],
        ).train()  # fmt: skip


if __name__ == "__main__":
    main()
