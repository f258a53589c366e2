"""Our functions compared with recorded results of verl (tests/oracles), and known differences.

Figures agree to 1e-6 in double precision (verl adds 1e-8 to the denominators of its means, we do
not), and to 2e-5 where the library computed in float32.
"""

import math

import pytest
import torch
from torch import Tensor

from tests.oracles.tables import Case, RecordedBatch, RecordedTable
from verl.config import ActorConfig, AlgorithmConfig
from verl.core_algos.advantages import ADVANTAGES, discounted_returns
from verl.core_algos.jagged import masked_whiten
from verl.core_algos.kl import (
    AdaptiveKLController,
    apply_kl_in_reward,
    kl_penalty,
    mean_sequence_kl,
)
from verl.core_algos.losses import loss_weights, value_loss, weighted_sum
from verl.core_algos.mismatch import importance_weights
from verl.core_algos.policy_losses import POLICY_LOSSES, PolicyDiagnostics, PolicyLossInputs
from verl.training.models import token_log_probs

VERL = RecordedTable.read("verl")
WHOLE = "dialogues pairs float32"
"""Batches in which every trajectory has policy tokens."""
OUR_LOSS = {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo", "gpg": "gpg"}


def parametrised(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.id for case in cases])


def assert_agree(ours: Tensor, theirs: Tensor, single: bool = False) -> None:
    """Assert equality to 1e-6, or to 2e-5 if either was computed in float32."""
    close = 2e-5 if single or theirs.dtype == torch.float32 else 1e-6
    torch.testing.assert_close(
        ours.detach().double(), theirs.double(), rtol=close, atol=close, check_dtype=False
    )


def estimate(name: str, batch: RecordedBatch, **options: object) -> Tensor:
    """Return our advantages at policy tokens; assert that the others are 0."""
    advantages = ADVANTAGES[name].compute(batch.inputs(**options)).advantages
    assert not advantages[~batch.policy_mask].any()
    return advantages[batch.policy_mask]


# Advantages


@parametrised(VERL.cases("advantage/gae"))
def test_gae_agrees_with_verl(case: Case) -> None:
    """Whitened advantages and returns, with a failed trajectory; documents add no step."""
    found = ADVANTAGES["gae"].compute(case.batch.inputs(**case.settings))
    mask = case.batch.policy_mask
    assert_agree(found.advantages[mask], case.on_policy("advantages"))
    assert_agree(found.returns[mask], case.on_policy("returns"))


def test_gae_over_all_tokens_agrees_with_verl_with_a_full_policy_mask() -> None:
    """The masks behind `compat.gae_over_all_tokens` and `compat.whiten_over_all_tokens`."""
    case = VERL.case("gae_over_all_tokens")
    everything = torch.ones_like(case.batch.policy_mask)
    found = ADVANTAGES["gae"].compute(case.batch.inputs(**case.settings, mask=everything))
    policy = case.batch.policy_mask
    assert_agree(found.advantages[policy], case.on_policy("advantages"))
    assert_agree(found.returns, case.padded("returns")[case.batch.kept])
    own = estimate("gae", case.batch, **case.settings)
    assert (own - found.advantages[policy]).abs().max() > 0.1


@parametrised(VERL.cases("advantage/grpo", batches=WHOLE)
              + VERL.cases("advantage/grpo_vectorized", batches=WHOLE))  # fmt: skip
def test_grpo_agrees_with_verl(case: Case) -> None:
    """With and without the deviation (Dr.GRPO), including a group of one."""
    single = case.quantity.endswith("vectorized")  # computed in float32
    theirs = case.on_policy("advantages")
    assert_agree(estimate("grpo", case.batch, **case.settings), theirs, single)
    if not case.settings["norm_by_std"]:
        assert_agree(estimate("dr_grpo", case.batch), theirs, single)


@parametrised(VERL.cases(
    "advantage/rloo", "advantage/opo", "advantage/reinforce_plus_plus_baseline",
    batches=WHOLE,
))  # fmt: skip
def test_group_estimators_agree_with_verl(case: Case) -> None:
    """RLOO, OPO and REINFORCE++ with baseline, including a group of one."""
    ours = estimate(case.quantity.removeprefix("advantage/"), case.batch)
    assert_agree(ours, case.on_policy("advantages"))


@parametrised(VERL.cases("advantage/grpo_passk"))
def test_passk_agrees_with_verl(case: Case) -> None:
    """The best of a group gets its lead; verl refuses a group of one, which we accept."""
    ours = estimate("grpo_passk", case.batch, **case.settings)
    assert_agree(ours, case.on_policy("advantages"))


@parametrised(VERL.cases("advantage/reinforce_plus_plus"))
def test_reinforce_plus_plus_agrees_with_verl(case: Case) -> None:
    """Whitened discounted returns; verl's `returns` are those before whitening."""
    batch = case.batch
    ours = estimate("reinforce_plus_plus", batch, **case.settings)
    assert_agree(ours, case.on_policy("advantages"))
    plain = discounted_returns(
        batch["rewards"], batch.policy_mask, batch.offsets, case.settings["gamma"]
    )
    assert_agree(plain[batch.policy_mask], case.on_policy("returns"))


@pytest.mark.parametrize(
    "name", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline", "grpo_passk"]
)
def test_a_failed_trajectory_does_not_count_in_its_group(name: str) -> None:
    """Ours on a batch with a failed trajectory equals verl's on the batch without it."""
    failed, kept = VERL.batches["failed"], VERL.case(f"advantage/{name}", "pairs")
    assert_agree(estimate(name, failed), kept.on_policy("advantages"))


@parametrised(VERL.cases("whiten"))
def test_whitening_agrees_with_verl_on_policy_tokens(case: Case) -> None:
    """At other tokens ours is 0, verl's is not."""
    mask = case.batch.policy_mask
    ours = masked_whiten(case.batch["values"], mask)
    assert_agree(ours[mask], case.on_policy("whitened"))
    assert not ours[~mask].any()
    assert case.padded("whitened")[~case.batch.mask].all()


def test_one_policy_token_whitens_to_0_and_verl_refuses_it() -> None:
    """A batch of one token has no variance."""
    assert VERL.case("whiten_one", "dialogues").outputs["error"] == "ValueError"
    assert masked_whiten(torch.tensor([3.0, 5.0]), torch.tensor([True, False])).tolist() == [0, 0]


# Policy losses


def policy_loss(
    case: Case, log_probs: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, PolicyDiagnostics]:
    """Compute our aggregated loss on a case's batch."""
    batch, clips = case.batch, case.settings["clip"]
    inputs = PolicyLossInputs(
        log_probs, batch.on_policy("old_log_probs"), batch.on_policy("advantages"),
        batch.sequence_ids, *clips,
    )  # fmt: skip
    losses, seen = POLICY_LOSSES[OUR_LOSS[case.quantity.removeprefix("policy_loss/")]](inputs)
    aggregation = case.settings["aggregation"]
    norm = case.settings["norm_length"] or batch.mask.shape[1]
    by_token = loss_weights(batch.policy_mask, batch.offsets, aggregation, norm)[batch.policy_mask]
    return weighted_sum(losses if weights is None else losses * weights, by_token), seen


@parametrised(VERL.cases(*(f"policy_loss/{name}" for name in OUR_LOSS)))
def test_policy_losses_and_their_gradients_agree_with_verl(case: Case) -> None:
    """Every loss, clip and aggregation.

    `seq-mean-token-sum-norm` divides by a length of ours that is given; without one verl takes the
    padded width.
    """
    batch = case.batch
    log_probs = batch.on_policy("log_probs").requires_grad_()
    weights = None
    if "importance" in case.settings:
        old, rollout = batch.on_policy("old_log_probs"), batch.on_policy("rollout_log_probs")
        weights = importance_weights(old, rollout, batch.sequence_ids, "token", 2.0)
    loss, seen = policy_loss(case, log_probs, weights)
    loss.backward()
    assert_agree(loss, torch.tensor(case.outputs["loss"], dtype=batch.dtype))
    assert_agree(log_probs.grad, case.on_policy("grad"))
    assert not case.padded("grad")[~batch.mask].any()
    means = {"pg_clipfrac": seen.clipped, "pg_clipfrac_lower": seen.dual_clipped,
             "ppo_kl": seen.approx_kl}  # fmt: skip
    for name, by_token in means.items():
        if name in case.outputs:
            theirs = torch.tensor(case.outputs[name], dtype=batch.dtype)
            assert_agree(by_token.mean(), theirs)


def extremes(precision: str) -> tuple[Case, Tensor]:
    """Return log-ratios of up to ±30, one token per sequence, and verl's results."""
    (case,) = VERL.cases("extremes", dtype=precision)
    return case, torch.tensor(case.settings["differences"], dtype=getattr(torch, precision))


def extreme_loss(name: str, ratio: Tensor, sign: float) -> tuple[float, Tensor]:
    """Compute our mean loss and its gradient with all advantages ±1."""
    log_probs, ids = ratio.clone().requires_grad_(), torch.arange(len(ratio))
    zero = torch.zeros_like(ratio)
    inputs = PolicyLossInputs(log_probs, zero, zero + sign, ids, 0.2, 0.2, 3.0)
    loss = POLICY_LOSSES[name](inputs)[0].mean()
    loss.backward()
    assert log_probs.grad is not None
    return loss.item(), log_probs.grad


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("name", ["vanilla", "cispo"])
@pytest.mark.parametrize("word", ["good", "bad"])
def test_bounds_on_the_ratio_agree_with_verl(precision: str, name: str, word: str) -> None:
    """Log-ratios of ±30 are bounded to ±20 in both, and the gradient beyond is 0 in both."""
    case, ratio = extremes(precision)
    loss, grad = extreme_loss(OUR_LOSS[name], ratio, 1.0 if word == "good" else -1.0)
    assert loss == pytest.approx(case.outputs[f"{name}_{word}"], rel=1e-6)
    theirs = torch.tensor(case.outputs[f"{name}_{word}_grad"][0], dtype=ratio.dtype)
    assert_agree(grad, theirs)


def test_gspos_ratio_is_bounded_by_e_20_and_verls_by_e_10() -> None:
    """At a negative advantage verl's gradient ends beyond exp(10), ours beyond exp(20)."""
    case, ratio = extremes("float64")
    at = dict(zip(case.settings["differences"], range(len(ratio)), strict=True))
    theirs = torch.tensor(case.outputs["gspo_bad_grad"][0]) * len(ratio)
    assert theirs[at[9.0]].item() == pytest.approx(math.exp(9.0), rel=1e-5)
    assert theirs[at[11.0]].item() == 0
    _, ours = extreme_loss("gspo", ratio, -1.0)
    assert ours[at[11.0]].item() * len(ratio) == pytest.approx(math.exp(11.0))
    assert not ours[ratio > 20.0].any()
    within = [at[d] for d in (-15.0, -3.0, -1e-4, 0.0, 1e-4, 3.0, 9.0)]
    assert_agree(ours[within].double() * len(ratio), theirs[within].double())


def test_approx_kl_is_not_bounded_where_verls_is() -> None:
    """verl logs the bounded log-ratio, we log the true one."""
    case, ratio = extremes("float64")
    assert case.outputs["vanilla_good_kl"] == pytest.approx(-ratio.clamp(-20, 20).mean().item())
    zero = torch.zeros_like(ratio)
    _, seen = POLICY_LOSSES["ppo"](PolicyLossInputs(ratio, zero, zero, zero.long()))
    assert seen.approx_kl.mean().item() == pytest.approx(-ratio.mean().item())


def test_a_loss_without_tokens_is_0_and_nan_in_verl() -> None:
    """verl computes 0 / 0 for `token-mean`."""
    assert VERL.case("empty_mean").outputs["loss"] == "nan"
    weights = loss_weights(torch.zeros(3, dtype=torch.bool), torch.tensor([0, 3]), "token-mean")
    assert weighted_sum(torch.ones(3), weights).item() == 0


# Value loss, KL, entropy


@parametrised(VERL.cases("value_loss"))
def test_value_loss_agrees_with_verl(case: Case) -> None:
    """The clipped loss and its gradient, in three aggregations."""
    batch = case.batch
    values = batch.on_policy("values").requires_grad_()
    losses = value_loss(
        values, batch.on_policy("old_values"), batch.on_policy("returns"),
        case.settings["clip_range"],
    )  # fmt: skip
    weights = loss_weights(batch.policy_mask, batch.offsets, case.settings["aggregation"])
    loss = weighted_sum(losses, weights[batch.policy_mask])
    loss.backward()
    assert_agree(loss, torch.tensor(case.outputs["loss"], dtype=batch.dtype))
    assert_agree(values.grad, case.on_policy("grad"))


@parametrised(VERL.cases(
    *(f"kl/{kind}" for kind in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"))
))  # fmt: skip
def test_kl_estimators_agree_with_verl(case: Case) -> None:
    """Each estimator and its gradient."""
    log_probs = case.batch.padded("log_probs").requires_grad_()
    kl = kl_penalty(
        log_probs, case.batch.padded("ref_log_probs"), case.quantity.removeprefix("kl/")
    )
    kl.sum().backward()
    assert_agree(kl, case.padded("kl"))
    assert_agree(log_probs.grad, case.padded("grad"))


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_k3s_bounds_agree_with_verl(precision: str) -> None:
    """±20 on the log-ratio and 10 on the estimate, and gradients of 0 beyond."""
    case, ratio = extremes(precision)
    log_probs = ratio.clone().requires_grad_()
    kl = kl_penalty(log_probs, torch.zeros_like(ratio), "k3")
    kl.sum().backward()
    assert_agree(kl, torch.tensor(case.outputs["k3"][0], dtype=ratio.dtype))
    assert_agree(log_probs.grad, torch.tensor(case.outputs["k3_grad"][0], dtype=ratio.dtype))


def test_k3_of_close_policies_is_more_exact_than_verls_in_float32() -> None:
    """At a log-ratio of 1e-4 verl's float32 loses the estimate; ours keeps it to 0.1 %."""
    case, ratio = extremes("float32")
    small = ratio.abs() == ratio[ratio > 0].min()
    assert torch.tensor(case.outputs["k3"][0])[small].tolist() == [0, 0]
    exact, _ = extremes("float64")
    ours = kl_penalty(ratio, torch.zeros_like(ratio), "k3")[small]
    expected = torch.tensor(exact.outputs["k3"][0])[small]
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=0.0)


@parametrised(VERL.cases("kl_in_reward"))
def test_kl_in_the_reward_agrees_with_verl(case: Case) -> None:
    """Rewards and the adaptive coefficient; verl's mean counts a failed trajectory as KL 0."""
    batch, x = case.batch, case.settings
    pair = (batch["old_log_probs"], batch["ref_log_probs"], batch.policy_mask)
    rewards = apply_kl_in_reward(batch["rewards"], *pair, x["coef"], x["kind"])
    assert_agree(rewards[batch.policy_mask], case.on_policy("rewards"))
    kl = mean_sequence_kl(*pair, batch.offsets, x["kind"])
    share = batch.mask.any(1).double().mean()
    assert (share < 1) is bool(batch.name == "failed") or bool(
        (share < 1) == (batch.name == "failed")
    )
    assert_agree(kl * share, torch.tensor(case.outputs["mean_kl"], dtype=batch.dtype))
    controller = AdaptiveKLController(x["coef"], x["target"], x["horizon"])
    next_value = controller.next_value(case.outputs["mean_kl"], len(batch.index))
    assert next_value == pytest.approx(case.outputs["next_coef"], rel=1e-6)


def test_entropy_and_log_probs_agree_with_verl() -> None:
    """As the trainer computes a chunk of logits; without a gradient if only logged."""
    case = VERL.case("logits")
    logits = torch.tensor(case.settings["logits"], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor(case.settings["labels"])
    log_probs, entropy = token_log_probs(logits, labels, 1.0, learn_entropy=True)
    assert_agree(entropy, case.padded("entropy"), single=True)
    assert_agree(log_probs, case.padded("log_probs"), single=True)
    assert torch.autograd.gradcheck(lambda x: token_log_probs(x, labels, 0.7, True), logits)
    assert not token_log_probs(logits, labels, 1.0, learn_entropy=False)[1].requires_grad


# Mismatch of engine and trainer


def ratio_weights(batch: RecordedBatch, level: str, threshold: float, mask: float | None) -> Tensor:
    old, rollout = batch.on_policy("old_log_probs"), batch.on_policy("rollout_log_probs")
    return importance_weights(old, rollout, batch.sequence_ids, level, threshold, mask)


@parametrised(VERL.cases("importance/token", "importance/sequence"))
def test_importance_weights_agree_with_verl(case: Case) -> None:
    """Truncated at 2; verl's "0.5_2.0", which drops tokens outside, is our mask threshold."""
    is_masked = isinstance(case.settings["threshold"], str)
    ours = ratio_weights(
        case.batch, case.quantity.removeprefix("importance/"), 2.0, 2.0 if is_masked else None
    )
    assert_agree(ours, case.on_policy("weights"))


@parametrised(VERL.cases("importance/token", threshold=2.0))
def test_mismatch_kl_agrees_with_verl(case: Case) -> None:
    """KL(engine || trainer) by k3, as a mean over tokens."""
    batch = case.batch
    kl = kl_penalty(batch.on_policy("rollout_log_probs"), batch.on_policy("old_log_probs"), "k3")
    assert_agree(kl.mean(), torch.tensor(case.outputs["k3_kl"], dtype=batch.dtype))


@parametrised(VERL.cases("rejection/token", "rejection/sequence"))
def test_masking_drops_what_verl_rejects_and_keeps_the_loss_weights(case: Case) -> None:
    """The same tokens are dropped; verl then averages over the rest, we divide by all tokens."""
    batch = case.batch
    weights = ratio_weights(batch, case.quantity.removeprefix("rejection/"), math.inf, 2.0)
    kept = weights > 0
    assert torch.equal(kept, case.on_policy("mask").bool())
    assert 0 < kept.sum() < len(kept)
    inputs = PolicyLossInputs(
        batch.on_policy("log_probs"), batch.on_policy("old_log_probs"),
        batch.on_policy("advantages"), batch.sequence_ids,
    )  # fmt: skip
    losses, _ = POLICY_LOSSES["ppo"](inputs)
    ours = (losses * kept).mean()
    theirs = torch.tensor(case.outputs["token_mean_loss"], dtype=batch.dtype)
    assert_agree(ours, theirs * kept.sum() / len(kept))


# Defaults and coverage


def test_defaults_are_those_of_verl() -> None:
    """Clips, aggregation, KL and GAE have the same default values."""
    theirs, actor, algorithm = VERL.case("defaults").outputs, ActorConfig(), AlgorithmConfig()
    assert {name: getattr(actor, name) for name in theirs["actor"]} == theirs["actor"]
    assert {n: getattr(algorithm, n) for n in theirs["algorithm"]} == theirs["algorithm"]
