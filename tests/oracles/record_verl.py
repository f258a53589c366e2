"""Record the results of verl's public functions on random padded batches; see README.md here.

Run it in an environment with the PyPI package `verl`, from any folder but the repository's root,
where our own `verl` would be imported. It calls that library and contains none of its code.
"""

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from padded import DIALOGUES, FAILED, Padded, Table, random_batch
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import apply_kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils import torch_functional
from verl.workers.config import ActorConfig

from verl import DataProto

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
NORM = "seq-mean-token-sum-norm"
CLIPS = ((0.2, 0.2, 3.0), (0.2, 0.28, 3.0), (0.1, 0.3, 1.5))


def actor(low: float, high: float, c: float, norm_length: int | None = None) -> ActorConfig:
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1,
        clip_ratio=low, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=c,
    )  # fmt: skip
    config.global_batch_info["loss_scale_factor"] = norm_length
    return config


def advantages(table: Table, b: Padded) -> None:
    estimators = core_algos.ADV_ESTIMATOR_REGISTRY

    def add(name: str, settings: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        found = estimators[name](b["rewards"], *args, **kwargs)
        table.add(f"advantage/{name}", b.name, settings, advantages=found[0], returns=found[1])

    for gamma, lam in ((1.0, 1.0), (1.0, 0.95), (0.9, 0.9)):
        add("gae", {"gamma": gamma, "lam": lam}, b["values"], b.mask, gamma, lam)
    if b.name == "dialogues":  # with observations as policy tokens
        response = b.mask.flip(1).cumsum(1).flip(1).clamp(max=1)
        found = estimators["gae"](b["rewards"], b["values"], response, 1.0, 0.95)
        table.add("gae_over_all_tokens", b.name, {"gamma": 1.0, "lam": 0.95},
                  advantages=found[0], returns=found[1])  # fmt: skip
    for name in ("grpo", "grpo_vectorized"):
        for by_std in (True, False):
            add(name, {"norm_by_std": by_std}, b.mask, b.group, norm_adv_by_std_in_grpo=by_std)
    groups = ("rloo", "rloo_vectorized", "opo", "reinforce_plus_plus_baseline", "gpg")
    for name in groups:
        add(name, {}, b.mask, b.group)
    for gamma in (1.0, 0.9):
        add("reinforce_plus_plus", {"gamma": gamma}, b.mask, config=AlgoConfig(gamma=gamma))
    if b.name == "pairs":  # it refuses groups of one
        for by_std in (True, False):
            config = AlgoConfig(norm_adv_by_std_in_grpo=by_std)
            add("grpo_passk", {"norm_by_std": by_std}, b.mask, b.group, config=config)


def policy_losses(table: Table, b: Padded) -> None:
    plain: list[Any] = [("token-mean", clip, None) for clip in CLIPS]
    modes: list[Any] = [(mode, CLIPS[0], None) for mode in AGGREGATIONS[1:]]
    scaled: list[Any] = [(NORM, CLIPS[0], 5), (NORM, CLIPS[0], None)]
    chosen = {"dialogues": plain + modes + scaled, "failed": modes + scaled[:1]}
    for name in ("vanilla", "gspo", "cispo", "gpg"):
        for mode, clip, norm in chosen.get(b.name, plain[:1]):
            one_policy_loss(table, b, name, mode, clip, norm)
    weights = (b["old_log_probs"] - b["rollout_log_probs"]).exp().clamp(max=2.0)
    one_policy_loss(table, b, "vanilla", "token-mean", CLIPS[0], None, weights)


def one_policy_loss(
    table: Table, b: Padded, name: str, mode: str, clip: tuple[float, float, float],
    norm: int | None, weights: Tensor | None = None,
) -> None:  # fmt: skip
    log_probs = b["log_probs"].requires_grad_()
    function = core_algos.get_policy_loss_fn(name)
    loss, metrics = function(
        b["old_log_probs"], log_probs, b["advantages"], b.mask, mode, actor(*clip, norm), weights
    )
    loss.backward()
    settings = {"aggregation": mode, "clip": list(clip), "norm_length": norm}
    if weights is not None:
        settings["importance"] = "token"
    table.add(f"policy_loss/{name}", b.name, settings, loss=loss.item(), grad=log_probs.grad,
              **{k.removeprefix("actor/"): v for k, v in metrics.items()})  # fmt: skip


def value_losses(table: Table, b: Padded) -> None:
    for mode in AGGREGATIONS:
        for clip in (0.5, 0.2):
            values = b["values"].requires_grad_()
            loss, fraction = core_algos.compute_value_loss(
                values, b["returns"], b["old_values"], b.mask, clip, mode
            )
            loss.backward()
            table.add("value_loss", b.name, {"clip_range": clip, "aggregation": mode},
                      loss=loss.item(), grad=values.grad,
                      clip_fraction=fraction.item())  # fmt: skip


def kl(table: Table, b: Padded) -> None:
    for kind in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"):
        log_probs = b["log_probs"].requires_grad_()
        found = core_algos.kl_penalty(log_probs, b["ref_log_probs"], kind)
        found.sum().backward()
        table.add(f"kl/{kind}", b.name, {}, kl=found, grad=log_probs.grad)
    for kind in ("kl", "low_var_kl"):
        data = DataProto.from_dict({
            "response_mask": b.mask, "token_level_scores": b["rewards"],
            "old_log_probs": b["old_log_probs"], "ref_log_prob": b["ref_log_probs"],
        })  # fmt: skip
        controller = core_algos.AdaptiveKLController(0.01, 0.1, 100)
        data, metrics = apply_kl_penalty(data, controller, kind)
        settings = {"kind": kind, "coef": 0.01, "target": 0.1, "horizon": 100}
        table.add("kl_in_reward", b.name, settings, rewards=data.batch["token_level_rewards"],
                  mean_kl=metrics["actor/reward_kl_penalty"],
                  next_coef=float(controller.value))  # fmt: skip


def whitening(table: Table, b: Padded) -> None:
    table.add("whiten", b.name, {}, whitened=torch_functional.masked_whiten(b["values"], b.mask))
    one = torch.zeros_like(b.mask)
    one[0, 0] = 1
    table.add(
        "whiten_one", b.name, {}, error=refusal(torch_functional.masked_whiten, b["values"], one)
    )


def refusal(function: Callable[..., Any], *args: Any) -> str:
    """Return the name of the exception that a call raises, or an empty string."""
    try:
        function(*args)
    except (ValueError, NotImplementedError) as error:
        return type(error).__name__
    return ""


def mismatch(table: Table, b: Padded) -> None:
    for level in ("token", "sequence"):
        for threshold in (2.0, "0.5_2.0"):
            proto, _, metrics = compute_rollout_correction_and_rejection_mask(
                b["old_log_probs"], b["rollout_log_probs"], b.mask, level, threshold
            )
            table.add(f"importance/{level}", b.name, {"threshold": threshold},
                      weights=proto.batch["rollout_is_weights"],
                      k3_kl=metrics["rollout_corr/k3_kl"])  # fmt: skip
        kind = {"token": "token_k1", "sequence": "seq_sum_k1"}[level]
        _, mask, _ = compute_rollout_correction_and_rejection_mask(
            b["old_log_probs"], b["rollout_log_probs"], b.mask,
            rollout_rs=kind, rollout_rs_threshold="0.5_2.0",
        )  # fmt: skip
        loss, _ = core_algos.get_policy_loss_fn("vanilla")(
            b["old_log_probs"], b["log_probs"], b["advantages"], mask, "token-mean",
            actor(0.2, 0.2, 3.0),
        )  # fmt: skip
        table.add(f"rejection/{level}", b.name, {"mask_threshold": 2.0}, mask=mask,
                  token_mean_loss=loss.item())  # fmt: skip


def logits(table: Table) -> None:
    generator = torch.Generator().manual_seed(9)
    x = (3 * torch.randn(4, 7, generator=generator)).round(decimals=4).double()
    labels = torch.tensor([0, 3, 6, 2])
    table.add("logits", "", {"logits": x.tolist(), "labels": labels.tolist()},
              entropy=torch_functional.entropy_from_logits(x),
              log_probs=torch_functional.logprobs_from_logits(x, labels))  # fmt: skip
    x[0, 1] = -torch.inf
    table.add("logits_with_a_hole", "", {"hole": [0, 1]},
              entropy=torch_functional.entropy_from_logits(x))  # fmt: skip


def extremes(table: Table) -> None:
    """Record values beyond the bounds: one row with log-ratios of up to ±30."""
    differences = [-30.0, -15.0, -3.0, -1e-4, 0.0, 1e-4, 3.0, 9.0, 11.0, 15.0, 30.0]
    for dtype in (torch.float64, torch.float32):
        found = {}
        d = torch.tensor([differences], dtype=dtype)
        mask = torch.ones_like(d)
        new = d.clone().requires_grad_()
        k3 = core_algos.kl_penalty(new, torch.zeros_like(d), "k3")
        k3.sum().backward()
        found["k3"], found["k3_grad"] = k3, new.grad
        for name in ("vanilla", "gspo", "cispo"):
            for sign in (1.0, -1.0):
                # One token per row, so that gspo's ratio is the token's own.
                column = d.T.clone().requires_grad_()
                loss, metrics = core_algos.get_policy_loss_fn(name)(
                    torch.zeros_like(d.T), column, sign * mask.T, mask.T, "token-mean",
                    actor(0.2, 0.2, 3.0),
                )  # fmt: skip
                loss.backward()
                word = f"{name}_{'good' if sign > 0 else 'bad'}"
                found |= {word: loss.item(), f"{word}_grad": column.grad.T,
                          f"{word}_kl": metrics["actor/ppo_kl"]}  # fmt: skip
        name = str(dtype).removeprefix("torch.")
        table.add("extremes", "", {"differences": differences, "dtype": name}, **found)


def others(table: Table, b: Padded) -> None:
    nothing = torch.zeros_like(b.mask)
    loss = core_algos.agg_loss(b["values"], nothing, "token-mean").item()
    table.add("empty_mean", b.name, {}, loss=str(loss))
    full = refusal(core_algos.kl_penalty, b["log_probs"], b["ref_log_probs"], "full")
    table.add("kl_full", b.name, {}, error=full)
    names = ("clip_ratio", "clip_ratio_c", "loss_agg_mode", "entropy_coeff", "use_kl_loss",
             "kl_loss_coef", "kl_loss_type")  # fmt: skip
    options = ("gamma", "lam", "adv_estimator", "norm_adv_by_std_in_grpo", "kl_penalty")
    config, algorithm = actor(0.2, 0.2, 3.0), AlgoConfig()
    narrow = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=0.1
    )
    table.add("defaults", "", {}, actor={name: getattr(config, name) for name in names},
              algorithm={name: getattr(algorithm, name) for name in options},
              low_of_a_clip_ratio_of_a_tenth=narrow.clip_ratio_low,
              losses=sorted(core_algos.POLICY_LOSS_REGISTRY),
              estimators=sorted(core_algos.ADV_ESTIMATOR_REGISTRY))  # fmt: skip


def main() -> None:
    failed = random_batch("failed", FAILED, (0, 0, 0, 1, 1), seed=1)
    batches = [
        random_batch("dialogues", DIALOGUES, (0, 0, 0, 1, 1, 2)),
        failed,
        failed.without(1, "pairs"),
        random_batch("float32", DIALOGUES, (0, 0, 0, 1, 1, 2), torch.float32, seed=2),
    ]
    table = Table("verl", importlib.metadata.version("verl"), batches)
    for batch in batches:
        for record in (advantages, policy_losses, value_losses, kl, whitening, mismatch):
            record(table, batch)
    logits(table)
    extremes(table)
    others(table, batches[0])
    table.write(Path(__file__).parent)


if __name__ == "__main__":
    main()
