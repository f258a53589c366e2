"""Random mini-batches."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.batch import TokenBatch
from verl.core_algos.losses import loss_weights

VOCAB = 97


def make_batch(lengths: list[int], seed: int = 0) -> TokenBatch:
    """Make a random mini-batch with every column that updates read; prompts have two tokens."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.rand(total, generator=generator) < 0.6
    for start in offsets[:-1].tolist():
        mask[start : start + 2] = False

    def column(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(total, generator=generator)

    return TokenBatch(
        offsets,
        {
            "input_ids": torch.randint(0, VOCAB, (total,), generator=generator),
            "policy_mask": mask,
            "old_log_probs": -4.5 + column(0.3),
            "ref_log_probs": -4.5 + column(0.3),
            "rollout_log_probs": -4.5 + column(0.3),
            "advantages": column(),
            "values": column(0.2),
            "returns": column(),
            "loss_weights": loss_weights(mask, offsets, "token-mean"),
        },
        columns={"group": [f"g{i}" for i in range(len(lengths))]},
    )


def make_groups(groups: list[tuple[int, list[int]]], seed: int = 0) -> TokenBatch:
    """Make a batch as `make_batch`, of groups given by the lengths of prompt and responses."""
    members = [(f"g{i}", p, r) for i, (p, responses) in enumerate(groups) for r in responses]
    batch = make_batch([p + r for _, p, r in members], seed)
    ids, mask = batch.tokens["input_ids"], batch.tokens["policy_mask"]
    batch.tokens["response_mask"] = torch.ones_like(mask)
    prompts: dict[str, Tensor] = {}
    for start, (group, prompt, _) in zip(batch.offsets.tolist(), members, strict=False):
        own = slice(start, start + prompt)
        ids[own] = prompts.setdefault(group, ids[own].clone())
        batch.tokens["response_mask"][own] = mask[own] = False
        mask[start + prompt] = True  # the policy's first token follows the prompt
    batch.tokens["loss_weights"] = loss_weights(mask, batch.offsets, "token-mean")
    batch.columns["group"] = [group for group, _, _ in members]
    return batch


def make_tree(seed: int = 0) -> TokenBatch:
    """Make a group whose members have more and more in common, and a group of two equal ones.

    Of five responses to a prompt of 5, four go on with the same 20 tokens, of these two with the
    same 17, which end the shorter one, and two with the same 39.
    """
    batch = make_groups([(5, [30, 37, 60, 60, 60]), (3, [40, 40])], seed)
    ids, starts = batch.tokens["input_ids"], batch.offsets.tolist()
    shared = [(1, 25, (2, 3, 4)), (1, 42, (2,)), (3, 64, (4,)), (5, 43, (6,))]
    ids[starts[3] + 25], ids[starts[4] + 64] = 95, 95
    ids[starts[1] + 25], ids[starts[3] + 64] = 94, 94
    for source, end, others in shared:
        for other in others:
            ids[starts[other] : starts[other] + end] = ids[starts[source] : starts[source] + end]
    return batch
