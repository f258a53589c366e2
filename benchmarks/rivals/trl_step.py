"""Whole steps of TRL's GRPOTrainer with a search tool; runs in an environment that has TRL.

TRL samples with transformers, runs its own loop of tool calls and updates; nothing of it is
replaced. That the dialogues are ours takes three things that users may set: a chat template that
renders messages as our dialogues are, a response template that reads `<search> query </search>` as
a call, and stop strings. The end-of-sequence token that TRL wants after a turn is one more token.
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

from benchmarks.rivals.trl_update import options
from benchmarks.rivals.turns import Turns, arguments

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)
RESPONSE = {
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


class Steps(TrainerCallback):
    """A turn is a step, from its first batch to its optimizer step."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Before sampling."""
        self.turns.wait()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """After the optimizer step."""
        self.turns.stop()

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        """After the metrics of the step."""
        self.turns.answer(
            grad_norm=float(logs["grad_norm"]), score=float(logs["reward"]),
            sampled=float(logs["completions/mean_length"]),
            searches=float(logs["tools/call_frequency"]),
        )  # fmt: skip


def search_tool(url: str, tokenizer: Any, longest: int) -> Any:
    """The tool that TRL calls, for all dialogues of a turn at once."""

    def fetch(query: str) -> str:
        body = json.dumps({"queries": [query], "topk": 1, "return_scores": True}).encode()
        asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked) as answer:
            found = json.load(answer)["result"][0]
        documents = (one["document"]["contents"].partition("\n") for one in found)
        text = "".join(
            f"Doc {rank}(Title: {title}) {rest}\n"
            for rank, (title, _, rest) in enumerate(documents, 1)
        )
        ids = tokenizer(text)["input_ids"][:longest]
        return f"\n\n<information>{tokenizer.decode(ids)}</information>\n\n"

    async def search(query: str) -> str:
        """
        Finds documents.

        Args:
            query: What to look for.

        Returns:
            The documents.
        """
        return await asyncio.to_thread(fetch, query)

    return search


def exact_match(completions: list[Any], answers: list[list[str]], **_: Any) -> list[float]:
    """1 where the last answer is one of those expected, in any case."""
    scores = []
    for messages, expected in zip(completions, answers, strict=True):
        given = re.findall(r"<answer>([\s\S]*?)</answer>", messages[-1]["content"])
        known = {text.strip().lower() for text in expected}
        scores.append(float(bool(given) and given[-1].strip().lower() in known))
    return scores


def main() -> None:
    """Train on the prompts in order."""
    given = arguments(("--url", str))
    turns, work = Turns(), json.loads(given.work.read_text())
    tokenizer = AutoTokenizer.from_pretrained(given.model, padding_side="left")
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    model.generate = functools.partial(model.generate, tokenizer=tokenizer)  # for stop strings
    rows = {
        "prompt": [[{"role": "user", "content": text}] for text in work["prompts"]],
        "answers": work["answers"],
    }
    with tempfile.TemporaryDirectory() as out:
        config = options(
            out, given.micro, work["step_size"], work["group"], work["lr"],
            max_completion_length=work["longest"], max_tool_calling_iterations=work["max_turns"],
            generation_kwargs={
                "max_new_tokens": work["turn_length"], "stop_strings": ["</search>", "</answer>"],
            },
        )  # fmt: skip
        GRPOTrainer(
            model, exact_match, config, Dataset.from_dict(rows), processing_class=tokenizer,
            tools=[search_tool(given.url, tokenizer, work["observation_length"])],
            callbacks=[Steps(turns)],
        ).train()  # fmt: skip


if __name__ == "__main__":
    main()
