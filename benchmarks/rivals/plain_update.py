"""The loop that one writes with transformers alone: padded sequences, autocast, AdamW.

Prompts are padded on the left and responses on the right, so that logits are asked for of the
responses only. Of two attention kernels transformers takes the default.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM

from benchmarks.rivals.turns import Turns, arguments


def padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Ids and mask, (rows, longest prompt and response); loss mask, (rows, longest response)."""
    before = max(len(row["prompt"]) for row in rows)
    after = max(len(row["response"]) for row in rows)
    ids, mask, learned = [], [], []
    for row in rows:
        sides = (before - len(row["prompt"]), after - len(row["response"]))
        tokens = torch.tensor(row["prompt"] + row["response"])
        ids.append(pad(tokens, sides))
        mask.append(pad(torch.ones_like(tokens), sides))
        learned.append(pad(torch.tensor(row["mask"]), (0, sides[1])))
    return {"ids": torch.stack(ids), "mask": torch.stack(mask), "learned": torch.stack(learned)}


def advantages(rows: list[dict[str, Any]]) -> Tensor:
    """(rows,) scores less their group's mean, over its deviation."""
    found = torch.zeros(len(rows))
    for name in {row["group"] for row in rows}:
        members = [i for i, row in enumerate(rows) if row["group"] == name]
        scores = torch.tensor([rows[i]["score"] for i in members])
        found[members] = (scores - scores.mean()) / (scores.std() + 1e-6)
    return found


def update(
    model: Any, optimizer: torch.optim.Optimizer, rows: list[dict[str, Any]], size: int
) -> float:
    """One optimizer step in micro-batches of `size` rows; the norm of the gradient."""
    weights, total = advantages(rows), sum(sum(row["mask"]) for row in rows)
    for start in range(0, len(rows), size):
        micro = padded(rows[start : start + size])
        kept = micro["learned"].shape[1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(
                input_ids=micro["ids"], attention_mask=micro["mask"], use_cache=False,
                logits_to_keep=kept + 1,
            ).logits[:, :-1]  # fmt: skip
        log_p = logits.float().log_softmax(-1)
        log_p = log_p.gather(-1, micro["ids"][:, -kept:, None])[..., 0]
        ratio = (log_p - log_p.detach()).exp()
        gain = ratio * weights[start : start + size, None] * micro["learned"]
        (-gain.sum() / total).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def main() -> None:
    """Take turns."""
    given = arguments(("--lr", float))
    turns, work = Turns(), json.loads(given.work.read_text())
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, weight_decay=0.0, fused=True)
    while True:
        number = turns.wait()
        norm = update(model, optimizer, work[number], given.micro)
        turns.stop()
        turns.answer(grad_norm=norm)


if __name__ == "__main__":
    main()
