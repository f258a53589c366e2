"""A plain training loop with transformers alone: padded sequences, autocast, AdamW.

Prompts are padded on the left and responses on the right, so that logits are only computed for the
responses. The attention kernel is the default of transformers.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM

from benchmarks.rivals.tasks import TaskPipe, parse_arguments


def pad_rows(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad the rows of a micro-batch.

    Returns `ids` and `attention_mask`, (rows, longest prompt + longest response), and `loss_mask`,
    (rows, longest response).
    """
    prompt_length = max(len(row["prompt"]) for row in rows)
    response_length = max(len(row["response"]) for row in rows)
    ids, attention_mask, loss_mask = [], [], []
    for row in rows:
        padding = (prompt_length - len(row["prompt"]), response_length - len(row["response"]))
        tokens = torch.tensor(row["prompt"] + row["response"])
        ids.append(pad(tokens, padding))
        attention_mask.append(pad(torch.ones_like(tokens), padding))
        loss_mask.append(pad(torch.tensor(row["mask"]), (0, padding[1])))
    return {
        "ids": torch.stack(ids),
        "attention_mask": torch.stack(attention_mask),
        "loss_mask": torch.stack(loss_mask),
    }


def group_advantages(rows: list[dict[str, Any]]) -> Tensor:
    """Normalize the scores by the mean and standard deviation of their group: (rows,)."""
    advantages = torch.zeros(len(rows))
    for name in {row["group"] for row in rows}:
        members = [i for i, row in enumerate(rows) if row["group"] == name]
        scores = torch.tensor([rows[i]["score"] for i in members])
        advantages[members] = (scores - scores.mean()) / (scores.std() + 1e-6)
    return advantages


def update(
    model: Any, optimizer: torch.optim.Optimizer, rows: list[dict[str, Any]], size: int
) -> float:
    """Make one optimizer step in micro-batches of `size` rows; returns the gradient norm."""
    advantages, num_trained = group_advantages(rows), sum(sum(row["mask"]) for row in rows)
    for start in range(0, len(rows), size):
        micro = pad_rows(rows[start : start + size])
        response_length = micro["loss_mask"].shape[1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(
                input_ids=micro["ids"], attention_mask=micro["attention_mask"], use_cache=False,
                logits_to_keep=response_length + 1,
            ).logits[:, :-1]  # fmt: skip
        log_probs = logits.float().log_softmax(-1)
        log_probs = log_probs.gather(-1, micro["ids"][:, -response_length:, None])[..., 0]
        ratio = (log_probs - log_probs.detach()).exp()
        objective = ratio * advantages[start : start + size, None] * micro["loss_mask"]
        (-objective.sum() / num_trained).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def main() -> None:
    """Process tasks until there are no more."""
    args = parse_arguments(("--lr", float))
    pipe, work = TaskPipe(), json.loads(args.work.read_text())
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    while True:
        number = pipe.wait()
        norm = update(model, optimizer, work[number], args.micro)
        pipe.stop()
        pipe.answer(grad_norm=norm)


if __name__ == "__main__":
    main()
