"""Our functions compared with recorded results of TRL (tests/oracles), and known differences.

Figures agree to 1e-6 in double precision and to 2e-5 where either side computes in float32.
"""

import math

import pytest
import torch
from torch import Tensor

from tests.oracles.chunk import chunk_of_logits
from tests.oracles.tables import Case, RecordedTable
from verl.config import ActorConfig
from verl.core_algos.advantages import ADVANTAGES, STD_EPSILON, AdvantageInputs
from verl.core_algos.groups import Groups
from verl.core_algos.kl import kl_penalty
from verl.core_algos.losses import loss_weights, weighted_sum
from verl.core_algos.mismatch import importance_weights
from verl.core_algos.policy_losses import POLICY_LOSSES, PolicyLossInputs

TRL = RecordedTable.read("trl")
AGGREGATION = {"grpo": "seq-mean-token-mean", "bnpo": "token-mean", "dapo": "token-mean",
               "dr_grpo": "seq-mean-token-sum-norm", "cispo": "token-mean"}  # fmt: skip
"""Our losses by the names of TRL's."""
PER_ROW = ("grpo", "dr_grpo")
"""Losses that TRL averages over all rows, including those without a token."""
MAX_LENGTH = 8.0
WHOLE = "dialogues float32"


def parametrised(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[f"{i}-{c.id}" for i, c in enumerate(cases)])


def assert_agree(ours: Tensor, theirs: Tensor | float) -> None:
    """Assert equality to 1e-6, or to 2e-5 if TRL computed in float32."""
    theirs = torch.as_tensor(theirs, dtype=ours.dtype)
    close = 2e-5 if ours.dtype == torch.float32 else 1e-6
    torch.testing.assert_close(ours.detach(), theirs, rtol=close, atol=close)


def our_loss(case: Case, log_probs: Tensor) -> Tensor:
    """Compute TRL's objective by ours; its `delta` is our dual clip, without it unbounded."""
    batch, options = case.batch, case.settings
    old, ids = batch.on_policy("old_log_probs"), batch.sequence_ids
    advantages = batch.padded("advantages")[:, :1].expand(batch.mask.shape)[batch.mask]
    kind = options["loss_type"]
    # TRL bounds cispo's weight only above, by the ratio itself; others by its distance from 1.
    low = 1.0 if kind == "cispo" else 0.2
    high = options.get("epsilon_high", 0.2) - (1.0 if kind == "cispo" else 0.0)
    name = "cispo" if kind == "cispo" else "ppo"
    if options.get("importance_sampling_level") == "sequence":
        name = "gspo"
    losses, _ = POLICY_LOSSES[name](
        PolicyLossInputs(log_probs, old, advantages, ids, low, high, options.get("delta", math.inf))
    )
    if options.get("use_vllm"):
        rollout = batch.on_policy("rollout_log_probs")
        losses = losses * importance_weights(old, rollout, ids, "token", 2.0)
    if options.get("beta"):
        kl = kl_penalty(log_probs, batch.on_policy("ref_log_probs"), "k3")
        if options.get("corrected"):  # TRL multiplies KL by the ratio, we do not
            kl = kl * (log_probs - old).exp()
        losses = losses + options["beta"] * kl
    weights = loss_weights(batch.policy_mask, batch.offsets, AGGREGATION[kind], MAX_LENGTH)
    return weighted_sum(losses, weights[batch.policy_mask])


@parametrised(TRL.cases("grpo_loss"))
def test_losses_and_their_gradients_agree_with_trl(case: Case) -> None:
    """GRPO, BNPO, DAPO, Dr.GRPO, GSPO, CISPO; KL, `delta`, clip-higher and importance weights.

    Where a row has no token, TRL's means over rows count it, ours do not.
    """
    batch = case.batch
    share = batch.mask.any(1).double().mean().item()
    assert (share < 1) is (batch.name == "failed")
    factor = share if case.settings["loss_type"] in PER_ROW else 1.0
    log_probs = batch.on_policy("log_probs").requires_grad_()
    loss = factor * our_loss(case, log_probs)
    loss.backward()
    assert_agree(loss, case.outputs["loss"])
    assert log_probs.grad is not None
    assert_agree(log_probs.grad, case.on_policy("grad"))


def test_without_delta_trl_has_no_dual_clip() -> None:
    """Our default bound of 3 limits a loss beyond it; TRL's keeps growing."""
    case = TRL.case("grpo_loss", "dialogues", loss_type="dapo", delta=1.5)
    plain = TRL.case("grpo_loss", "dialogues", loss_type="dapo")
    assert "delta" not in plain.settings
    assert abs(case.outputs["loss"] - plain.outputs["loss"]) > 1e-3


def our_advantages(case: Case, name: str, norm_by_std: bool = False) -> Tensor:
    """Compute advantages of TRL's scores, one token per trajectory, none for unscored ones."""
    scores, size = case.settings["scores"], case.settings["group_size"]
    mask = torch.tensor([score is not None for score in scores])
    inputs = AdvantageInputs(
        torch.tensor([score or 0.0 for score in scores]),
        mask,
        torch.arange(len(scores) + 1),
        group_ids=[i // size for i in range(len(scores))],
        norm_by_std=norm_by_std,
    )
    return ADVANTAGES[name].compute(inputs).advantages


def test_advantages_agree_with_a_step_of_trls_trainers() -> None:
    """RLOO, and GRPO without the deviation; in both, unscored trajectories do not count."""
    rloo, plain = TRL.case("advantage/rloo"), TRL.case("advantage/grpo", scale_rewards="none")
    assert None in rloo.settings["scores"]
    assert_agree(our_advantages(rloo, "rloo"), rloo.padded("advantages"))
    assert_agree(our_advantages(plain, "dr_grpo"), plain.padded("advantages"))


def test_grpo_differs_from_trl_by_the_epsilon_of_the_deviation() -> None:
    """It is 1e-6 here, as in verl, and 1e-4 in TRL."""
    case = TRL.case("advantage/grpo", scale_rewards="group")
    plain = TRL.case("advantage/grpo", scale_rewards="none").padded("advantages")
    ours, theirs = our_advantages(case, "grpo", norm_by_std=True), case.padded("advantages")
    moved = theirs != 0
    deviation = plain[moved] / theirs[moved] - 1e-4
    assert_agree(ours[moved], plain[moved].float() / (deviation.float() + STD_EPSILON))
    assert 5e-5 < (ours[moved] / theirs[moved] - 1).min() < 1e-3
    assert not ours[~moved].any()


@parametrised(TRL.cases("rloo_loss", batches=WHOLE))
def test_rloo_at_a_ratio_of_1_agrees_with_trl(case: Case) -> None:
    """TRL clips ratios of whole trajectories; in the first update both agree, tokens summed."""
    batch = case.batch
    log_probs = batch.on_policy("old_log_probs").requires_grad_()
    advantages = batch.padded("advantages")[:, :1].expand(batch.mask.shape)[batch.mask]
    old = log_probs.detach()
    losses, _ = POLICY_LOSSES["ppo"](
        PolicyLossInputs(log_probs, old, advantages, batch.sequence_ids)
    )
    weights = loss_weights(batch.policy_mask, batch.offsets, "seq-mean-token-sum")
    weighted_sum(losses, weights[batch.policy_mask]).backward()
    assert log_probs.grad is not None
    assert_agree(log_probs.grad, case.on_policy("grad"))


@parametrised(TRL.cases("logits"))
def test_log_probs_entropy_and_their_gradient_agree_with_trl(case: Case) -> None:
    """For the trainer's chunk, at two temperatures."""
    x = case.settings
    logits = torch.tensor(x["logits"], dtype=torch.float64, requires_grad=True)
    log_probs, entropy = chunk_of_logits(logits, x["labels"], x["temperature"])
    (log_probs.sum() + 0.5 * entropy.sum()).backward()
    assert_agree(log_probs, case.padded("log_probs"))
    assert_agree(entropy, case.padded("entropy"))
    assert logits.grad is not None
    assert_agree(logits.grad, case.padded("grad"))


def test_a_groups_deviation_agrees_with_trl() -> None:
    """Both are unbiased."""
    case = TRL.case("group_std")
    scores = torch.tensor(case.settings["scores"], dtype=torch.float64)
    ids = torch.arange(len(scores)).repeat_interleave(scores.shape[1])
    groups = Groups(ids, torch.ones(scores.numel(), dtype=torch.bool))
    ours = groups.std(scores.flatten()).reshape(scores.shape)[:, 0]
    assert_agree(ours, case.padded("std"))


def test_defaults_that_differ_from_trls_are_listed() -> None:
    """docs/explanation/algorithms.md lists them: KL, correction of the mismatch, dual clip."""
    theirs, ours = TRL.case("defaults").outputs["grpo"], ActorConfig()
    assert theirs["epsilon"] == ours.clip_ratio
    assert AGGREGATION[theirs["loss_type"]] == ours.loss_agg_mode
    assert (theirs["beta"], ours.use_kl_loss) == (0.0, False)
    assert (theirs["delta"], ours.clip_ratio_c) == (None, 3.0)
    assert theirs["vllm_importance_sampling_correction"] and ours.rollout_is == "none"
    assert theirs["use_bias_correction_kl"]
