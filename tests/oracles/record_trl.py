"""Record the results of TRL's functions on random padded batches; see README.md here.

Its losses are methods of trainers. They are called with a fake trainer that has the options they
read, and whose model is a column of log-probs, so that gradients with respect to these are
recorded. This script calls the library and contains none of its code.
"""

import importlib.metadata
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from padded import DIALOGUES, FAILED, Padded, Table, random_batch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer.utils import (
    entropy_from_logits,
    nanstd,
    selective_log_softmax,
    selective_log_softmax_and_entropy,
)
from trl_trainers import advantages

MAX_LENGTH = 8


def trainer(log_probs: Tensor, **options: Any) -> Any:
    """Make a fake trainer with all that the loss of a GRPOTrainer or RLOOTrainer reads."""
    own = {"beta": 0.0, "loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.2,
           "importance_sampling_level": "token", "use_vllm": False} | options  # fmt: skip
    args = SimpleNamespace(
        use_bias_correction_kl=own.pop("corrected", False),
        delta=own.pop("delta", None),
        steps_per_generation=1,
    )
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
    )
    entropies = torch.zeros_like(log_probs)
    return SimpleNamespace(
        args=args, accelerator=accelerator, model=SimpleNamespace(training=True),
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, entropies, None),
        _metrics={"train": defaultdict(list)}, current_gradient_accumulation_steps=1,
        max_completion_length=MAX_LENGTH, aux_loss_enabled=False, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, _entropy_bonus_enabled=False,
        vllm_importance_sampling_correction=own["use_vllm"], **own,
    )  # fmt: skip


def inputs(b: Padded) -> dict[str, Tensor]:
    """Convert a batch to TRL's inputs: rows are completions, observations the `tool_mask`."""
    ids = torch.zeros(b.mask.shape, dtype=torch.int64)
    return {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids, "completion_mask": torch.ones_like(b.mask), "tool_mask": b.mask,
        "advantages": b["advantages"][:, 0], "old_per_token_logps": b["old_log_probs"],
        "ref_per_token_logps": b["ref_log_probs"], "num_items_in_batch": b.mask.sum(),
    }  # fmt: skip


def grpo_loss(table: Table, b: Padded, **options: Any) -> None:
    log_probs = b["log_probs"].requires_grad_()
    batch = inputs(b)
    if options.get("use_vllm"):
        ratio = (b["old_log_probs"] - b["rollout_log_probs"]).exp().clamp(max=2.0)
        batch["importance_sampling_ratio"] = ratio
    fake = trainer(log_probs, **options)
    loss = GRPOTrainer._compute_loss(fake, None, batch)
    loss.backward()
    metrics = {name.replace("/", "_"): x[0] for name, x in fake._metrics["train"].items()
               if name in ("kl", "clip_ratio/region_mean")}  # fmt: skip
    table.add("grpo_loss", b.name, options, loss=loss.item(), grad=log_probs.grad, **metrics)


def grpo_losses(table: Table, b: Padded) -> None:
    for kind in ("grpo", "bnpo", "dr_grpo", "dapo"):
        grpo_loss(table, b, loss_type=kind)
    grpo_loss(table, b, loss_type="dapo", epsilon_high=0.28)
    grpo_loss(table, b, loss_type="dapo", delta=1.5)
    grpo_loss(table, b, loss_type="dapo", beta=0.1)
    grpo_loss(table, b, loss_type="dapo", beta=0.1, corrected=True)
    grpo_loss(table, b, loss_type="dapo", use_vllm=True)
    grpo_loss(table, b, loss_type="grpo", importance_sampling_level="sequence")
    grpo_loss(table, b, loss_type="cispo", epsilon_high=1.2)


def rloo_loss(table: Table, b: Padded) -> None:
    """Record the loss for the policy that sampled, whose ratio is 1."""
    log_probs = b["old_log_probs"].requires_grad_()
    batch = inputs(b) | {"completion_mask": b.mask}
    batch["old_logps"] = (b["old_log_probs"] * b.mask).sum(1)
    loss = RLOOTrainer._compute_loss(trainer(log_probs), None, batch)
    loss.backward()
    table.add("rloo_loss", b.name, {}, loss=loss.item(), grad=log_probs.grad)


def logits(table: Table) -> None:
    generator = torch.Generator().manual_seed(9)
    x = (3 * torch.randn(5, 7, generator=generator)).double().round(decimals=4)
    labels = torch.tensor([0, 3, 6, 2, 2])
    for temperature in (1.0, 0.7):
        warm = x.clone().requires_grad_()
        log_probs, entropy = selective_log_softmax_and_entropy(warm, labels, True, temperature)
        (log_probs.sum() + 0.5 * entropy.sum()).backward()
        table.add("logits", "", {"logits": x.tolist(), "labels": labels.tolist(),
                  "temperature": temperature}, log_probs=log_probs, entropy=entropy,
                  grad=warm.grad)  # fmt: skip
    table.add("logits_apart", "", {"logits": x.tolist(), "labels": labels.tolist()},
              entropy=entropy_from_logits(x),
              log_probs=selective_log_softmax(x, labels))  # fmt: skip
    scores = x[:, :4]
    table.add("group_std", "", {"scores": scores.tolist()}, std=nanstd(scores, dim=1))


def group_advantages(table: Table) -> None:
    """Record groups of three: with different scores, equal scores, and a missing score."""
    scores = [0.3, 1.0, -0.2, 1.0, 1.0, 1.0, 0.7, None, 0.1]
    for name, options in (
        ("grpo", {"scale_rewards": "group"}),
        ("grpo", {"scale_rewards": "none"}),
        ("rloo", {}),
    ):
        found = advantages(name, scores, 3, **options)
        settings = {"scores": scores, "group_size": 3, **options}
        table.add(f"advantage/{name}", "", settings, advantages=found)


def defaults(table: Table) -> None:
    names = ("beta", "epsilon", "epsilon_high", "delta", "loss_type", "scale_rewards",
             "importance_sampling_level", "temperature", "entropy_coef",
             "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
             "vllm_importance_sampling_clip_max", "use_bias_correction_kl")  # fmt: skip
    grpo = GRPOConfig(use_cpu=True, bf16=False, report_to=[])
    rloo = RLOOConfig(use_cpu=True, bf16=False, report_to=[])
    found = {name: getattr(grpo, name) for name in names}
    apart = {name: getattr(rloo, name) for name in ("beta", "epsilon", "normalize_advantages")}
    table.add("defaults", "", {}, grpo=found, rloo=apart)


def main() -> None:
    batches = [
        random_batch("dialogues", DIALOGUES, (0, 0, 0, 1, 1, 2), seed=3),
        random_batch("failed", FAILED, (0, 0, 0, 1, 1), seed=4),
        random_batch("float32", DIALOGUES, (0, 0, 0, 1, 1, 2), torch.float32, seed=5),
    ]
    table = Table("trl", importlib.metadata.version("trl"), batches)
    for batch in batches:
        grpo_losses(table, batch)
        rloo_loss(table, batch)
    logits(table)
    group_advantages(table)
    defaults(table)
    table.write(Path(__file__).parent)


if __name__ == "__main__":
    main()
