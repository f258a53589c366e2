"""Log-probs and updates of the policy, compared with plain transformers and manual losses."""

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from example.tiny import tiny_llama
from tests.core.batches import make_batch, make_groups, make_tree
from tests.verl.training.operations import OperationRecorder
from tests.verl.training.ranks import VOCAB
from verl.batch import TokenBatch
from verl.config import ActorConfig, Config, OptimConfig
from verl.config.policy import SELECTIVE
from verl.ext.cpu import attention
from verl.packing import PREFIXES, common_prefixes, saved_token_share
from verl.trainer.learn import drop_zero_advantages
from verl.training.actor import Actor, TargetColumns, TokenBudgets, apply_update
from verl.training.attention import PACKED
from verl.training.fsdp import FsdpModel, FsdpOptions
from verl.training.models import LogProbModel, blocks, recompute
from verl.training.worker import TrainerWorker

pytestmark = pytest.mark.usefixtures("single_rank")
LENGTHS = [12, 9, 17, 5]
TEMPERATURE = 0.7


MASKED = {"rollout_is": "sequence", "rollout_mask_threshold": 8.0}


def make_actor(
    budget: int = 1000, recomputed: bool | str = False, dtype: torch.dtype = torch.float32,
    **options: object,
) -> Actor:  # fmt: skip
    """Build a tiny actor in `dtype` whose blocks recompute activations as in `recompute`."""
    lm = tiny_llama(VOCAB)
    lm.set_attn_implementation(PACKED)
    recompute(lm, recomputed)
    config = ActorConfig(optim=OptimConfig(lr=1e-3), **options)  # type: ignore[arg-type]
    fsdp_options = FsdpOptions(dtype, 10, config.optim)
    model = FsdpModel(LogProbModel(lm), blocks(lm, lm), torch.device("cpu"), fsdp_options)
    return Actor(model, config, TokenBudgets(budget, budget), TEMPERATURE)


def plain_log_probs(lm: torch.nn.Module, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropies of all tokens by unpacked forwards; 0 for first tokens."""
    log_probs, entropies = [], []
    for ids in batch.sequences("input_ids"):
        log_p = torch.log_softmax(lm(ids[None]).logits[0, :-1] / TEMPERATURE, -1)
        log_probs += [torch.zeros(1), log_p.gather(-1, ids[1:, None])[:, 0]]
        entropies += [torch.zeros(1), -(log_p.exp() * log_p).sum(-1)]
    return torch.cat(log_probs), torch.cat(entropies)


def weights(actor: Actor) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in actor.model.full_parameters("lm.")}


def test_log_probs_equal_plain_transformers() -> None:
    """Packed, chunked, sharded log-probs are log_softmax of plain logits, 0 off the mask."""
    batch = make_batch(LENGTHS)
    expected, _ = plain_log_probs(tiny_llama(VOCAB), batch)
    expected = torch.where(batch.tokens["policy_mask"], expected, 0.0)
    for budget in (1000, 20):
        actual = make_actor(budget).log_probs(batch)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_chunking_logits_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens of logits at a time give the loss and gradient of all at once."""
    batch = make_batch(LENGTHS)
    whole = make_actor(entropy_coeff=0.1).update(batch)
    monkeypatch.setattr("verl.training.models.LOGITS_PER_CHUNK", 3 * VOCAB)
    assert make_actor(entropy_coeff=0.1).update(batch) == pytest.approx(whole, rel=1e-4, abs=1e-6)


def test_masks_of_short_runs_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks reuse the first block's masks, although FSDP copies a block's arguments."""
    calls, mask = [], attention.causal_mask
    monkeypatch.setattr(attention, "causal_mask", lambda *args: calls.append(args) or mask(*args))
    make_actor(dtype=torch.bfloat16).update(make_batch(LENGTHS))
    assert [length for length, *_ in calls] == LENGTHS


@pytest.mark.parametrize(("high", "bound"), [(None, 1.2), (0.4, 1.4)])
def test_loss_and_gradient_equal_a_hand_written_loss(high: float | None, bound: float) -> None:
    """Clipped surrogate with KL and entropy, weighted, by autograd over plain transformers."""
    batch = make_batch(LENGTHS)
    lm, c = tiny_llama(VOCAB), batch.tokens
    log_probs, entropy = plain_log_probs(lm, batch)
    for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs"):
        c[name] = log_probs.detach() + c[name] + 4.5  # moves the noise to the right level
    options = {"use_kl_loss": True, "kl_loss_coef": 0.1, "clip_ratio_high": high}
    actual = make_actor(entropy_coeff=0.02, **options).update(batch)
    ratio, adv = (log_probs - c["old_log_probs"]).exp(), c["advantages"]
    surrogate = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.8, bound))
    surrogate = torch.where(adv < 0, torch.minimum(surrogate, -3 * adv), surrogate)
    delta = c["ref_log_probs"] - log_probs
    per_token = surrogate + 0.1 * (delta.exp() - delta - 1) - 0.02 * entropy
    mask = c["policy_mask"]
    loss = per_token[mask].mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in lm.parameters()]).norm()
    assert 0 < actual["actor/clip_fraction"] < 1
    assert actual["actor/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert actual["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert actual["actor/entropy"] == pytest.approx(entropy[mask].mean().item(), rel=1e-4)
    mismatch = (c["old_log_probs"] - c["rollout_log_probs"]).abs()[mask]
    assert actual["actor/rollout_mismatch"] == pytest.approx(mismatch.mean().item(), rel=1e-4)
    assert actual["actor/rollout_mismatch_max"] == pytest.approx(mismatch.max().item(), rel=1e-4)


def test_losses_are_reported_as_sums_and_other_metrics_as_means() -> None:
    """Weights that do not sum to 1, as with Dr.GRPO, scale the loss, but not the entropy."""
    single, double = make_batch(LENGTHS), make_batch(LENGTHS)
    double.tokens["loss_weights"] = 2 * double.tokens["loss_weights"]
    options = {
        "entropy_coeff": 0.1,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "terms": {"llds": 0.1},
    }
    once, twice = (make_actor(**options).update(batch) for batch in (single, double))
    for name in ("loss", "pg_loss", "kl_loss", "llds_loss", "grad_norm"):
        assert twice[f"actor/{name}"] == pytest.approx(2 * once[f"actor/{name}"], rel=1e-4)
    for name in ("entropy", "ppo_kl", "clip_fraction", "rollout_mismatch", "rollout_kl"):
        assert twice[f"actor/{name}"] == pytest.approx(once[f"actor/{name}"], rel=1e-4)
    assert once["actor/pg_loss"] != 0 != once["actor/entropy"]


def test_options_of_the_loss_equal_a_hand_written_loss() -> None:
    """GPG weighted by truncated sequence ratios, with LLDS gated by turn, by loops and autograd."""
    batch = make_batch(LENGTHS)
    lm, c = tiny_llama(VOCAB), batch.tokens
    log_probs, _ = plain_log_probs(lm, batch)
    for name in ("old_log_probs", "rollout_log_probs"):
        c[name] = log_probs.detach() + c[name] + 4.5
    truncated = {"rollout_is": "sequence", "rollout_is_threshold": 1.5}
    options = {"policy_loss": "gpg", "rollout_correction": truncated, "terms": {"llds": 0.3}}
    actual = make_actor(**options).update(batch)
    loss, num_tokens = torch.zeros(()), int(c["policy_mask"].sum())
    bounds = batch.offsets.tolist()
    for start, end in itertools.pairwise(bounds):
        own = [t for t in range(start, end) if c["policy_mask"][t]]
        ratio = (c["old_log_probs"] - c["rollout_log_probs"])[own].sum().exp().clamp(max=1.5)
        loss = loss - (ratio * c["advantages"] * log_probs)[own].sum()
        turns = [[t for t in own if t <= u and set(range(t, u)) <= set(own)] for u in own]
        for turn in (t for t in turns if t[-1] + 1 not in own):
            preserved = [t for t in turn if c["advantages"][t] >= 0]
            drops = (c["old_log_probs"] - log_probs)[preserved]
            loss = loss + 0.3 * (drops.clamp(min=0).sum() if drops.sum() > 0 else 0.0)
    assert actual["actor/loss"] == pytest.approx(loss.item() / num_tokens, rel=1e-4)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in lm.parameters()]).norm() / num_tokens
    assert actual["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert actual["actor/llds_loss"] > 0


@pytest.mark.parametrize("budget", [1000, 17])
def test_corrections_are_reported_over_all_tokens(budget: int) -> None:
    """Mean weight, effective sample size and masked share, in one micro-batch or several."""
    batch = make_batch(LENGTHS)
    options = {"rollout_is": "token", "rollout_is_threshold": 1.1,
               "rollout_mask": "geometric", "rollout_mask_threshold": 1.1}  # fmt: skip
    actual = make_actor(budget, rollout_correction=options).update(batch)
    c, weights = batch.tokens, []
    for start, end in itertools.pairwise(batch.offsets.tolist()):
        log_ratio = (c["old_log_probs"] - c["rollout_log_probs"])[start:end]
        log_ratio = log_ratio[c["policy_mask"][start:end]]
        is_kept = 1 / 1.1 <= math.exp(log_ratio.mean()) <= 1.1
        weights += [min(1.1, math.exp(x)) * is_kept for x in log_ratio.tolist()]
    n, total, squares = len(weights), sum(weights), sum(w * w for w in weights)
    assert 0 < weights.count(0.0) < n
    assert actual["actor/rollout_weight"] == pytest.approx(total / n, rel=1e-4)
    assert actual["actor/rollout_ess"] == pytest.approx(total**2 / n / squares, rel=1e-4)
    assert actual["actor/rollout_masked"] == pytest.approx(weights.count(0.0) / n, rel=1e-4)


@pytest.mark.parametrize(
    ("positions", "turns"),
    [
        ([], []),
        ([2, 3, 4], [0, 0, 0]),
        ([2, 4], [0, 1]),  # one observed token between two turns
        ([1, 2, 4, 5, 9, 11], [0, 0, 1, 1, 2, 3]),
    ],
)
def test_one_observed_token_separates_two_turns(positions: list[int], turns: list[int]) -> None:
    """A turn is a run of adjacent tokens, however short the observation after it is."""
    targets = torch.tensor(positions, dtype=torch.int64)
    inputs: Any = SimpleNamespace(target_positions=targets, targets=targets)
    assert TargetColumns(make_batch([12]), inputs).turns.tolist() == turns


def test_weights_are_whole_and_exact_after_a_forward() -> None:
    """Weights read after a pass without backward are the float32 ones, not gathered copies."""
    lm = tiny_llama(VOCAB)
    lm.set_attn_implementation(PACKED)
    model = FsdpModel(
        LogProbModel(lm), blocks(lm, lm), torch.device("cpu"),
        FsdpOptions(torch.bfloat16, 10, OptimConfig()),
    )  # fmt: skip
    actor = Actor(model, ActorConfig(), TokenBudgets())
    actor.log_probs(make_batch(LENGTHS))
    expected = dict(tiny_llama(VOCAB).named_parameters())
    assert all(torch.equal(x, expected[name]) for name, x in weights(actor).items())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy_loss": "gspo", "rollout_correction": MASKED},
        {
            "policy_loss": "cispo",
            "rollout_correction": {"rollout_is": "token"},
            "terms": {"llds": 0.1},
        },
        {"policy_loss": "gpg", "terms": {"llds": 0.1}},
    ],
    ids=str,
)
def test_gradient_accumulation_equals_the_unsplit_batch(options: dict[str, object]) -> None:
    """Several micro-batches, with any recomputation in backward, update as a single one does."""
    batch, whole = make_batch(LENGTHS), make_actor(1000, **options)
    one = whole.update(batch)
    assert one.pop("actor/num_micro_batches") == 1
    for recomputed in (True, SELECTIVE):
        split = make_actor(17, recomputed, **options)
        many = split.update(batch)
        assert many.pop("actor/num_micro_batches") == 3
        assert many == pytest.approx(one, rel=1e-4, abs=1e-6)
        for name, x in weights(whole).items():
            torch.testing.assert_close(weights(split)[name], x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.1},
        {
            "policy_loss": "gspo",
            "rollout_correction": {"rollout_is": "sequence"},
            "terms": {"llds": 0.1},
        },
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("make", "budget", "expected"),
    [
        (lambda: make_groups([(7, [5, 1, 12]), (9, [3, 8]), (4, [6])]), 1000, [1, 1]),
        (lambda: make_groups([(7, [5, 1, 12]), (9, [3, 8]), (4, [6])]), 25, [4, 3]),
        (make_tree, 1000, [1, 1]),
        (make_tree, 150, [3, 2]),
    ],
)
def test_an_update_with_shared_prompts_is_the_same_update(
    options: dict[str, object], make: Callable[[], TokenBatch], budget: int, expected: list[int]
) -> None:
    """Groups whole in a micro-batch, or split: metrics, log-probs and weights do not change."""
    plain, shared = make(), make()
    shared.columns[PREFIXES] = common_prefixes(shared)
    apart, together = make_actor(budget, **options), make_actor(budget, **options)
    torch.testing.assert_close(together.log_probs(shared), apart.log_probs(plain))
    metrics = [actor.update(b) for actor, b in ((apart, plain), (together, shared))]
    counts = [m.pop("actor/num_micro_batches") for m in metrics]
    assert counts == expected
    shares = [m.pop("actor/computed_token_share") for m in metrics]
    assert 1 - saved_token_share(shared) <= shares[1] < shares[0] == 1.0
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-4, abs=1e-6)
    shared_weights = weights(together)
    for name, x in weights(apart).items():  # in the mean: AdamW amplifies gradients near 0
        assert (shared_weights[name] - x).abs().mean() < 1e-6


@pytest.mark.parametrize(
    ("options", "is_skipped"),
    [
        ({}, True),
        ({"policy_loss": "gspo", "rollout_correction": {"rollout_is": "sequence"}}, True),
        ({"policy_loss": "cispo", "rollout_correction": {"rollout_is": "token"}}, True),
        ({"policy_loss": "gpg"}, True),
        ({"entropy_coeff": 0.1}, False),
        ({"terms": {"llds": 0.1}}, False),
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, False),
    ],
    ids=str,
)
def test_trajectories_without_advantage_are_skipped_if_they_have_no_gradient(
    options: dict[str, object], is_skipped: bool
) -> None:
    """They change nothing when skipped, and are not skipped if the loss has other terms."""
    config, batch = Config(), make_batch(LENGTHS)
    config.actor_rollout_ref.actor = ActorConfig(**options)  # type: ignore[arg-type]
    assert config.needs_every_trajectory is not is_skipped
    for sequence in (0, 2):
        batch.tokens["advantages"][slice(*batch.offsets[sequence : sequence + 2])] = 0.0
    few = drop_zero_advantages(batch)
    assert few.columns["group"] == [batch.columns["group"][i] for i in (1, 3)]
    norms = [make_actor(**options).update(b)["actor/grad_norm"] for b in (batch, few)]
    assert (norms[1] == pytest.approx(norms[0], rel=1e-4)) is is_skipped


@pytest.mark.parametrize(
    "options",
    [
        {"policy_loss": "ppo", "use_kl_loss": True, "entropy_coeff": 0.1},
        {"policy_loss": "gspo", "rollout_correction": MASKED},
        {"policy_loss": "cispo", "terms": {"llds": 0.1}},
        {"policy_loss": "gpg", "terms": {"llds": 0.1}},
    ],
    ids=str,
)
def test_an_update_is_deterministic_on_gpus(options: dict[str, object]) -> None:
    """torch's deterministic mode raises for no operation, forward or backward."""
    actor, batch, recorder = (
        make_actor(17, True, **options),
        make_batch(LENGTHS),
        OperationRecorder(),
    )
    with recorder:
        actor.log_probs(batch)
        actor.update(batch)
    assert {"embedding_dense_backward", "_log_softmax", "_fused_adamw_"} <= recorder.names
    assert not recorder.refused


def test_observation_tokens_do_not_matter() -> None:
    """Columns with NaN at prompt and observation tokens do not change the update."""
    clean, dirty = make_batch(LENGTHS), make_batch(LENGTHS)
    for name in ("old_log_probs", "ref_log_probs", "advantages", "rollout_log_probs"):
        dirty.tokens[name][~dirty.tokens["policy_mask"]] = torch.nan
    first, second = make_actor(use_kl_loss=True), make_actor(use_kl_loss=True)
    assert first.update(clean) == second.update(dirty)
    for name, x in weights(first).items():
        assert torch.equal(weights(second)[name], x)


def test_without_state_masking_observations_are_in_the_loss() -> None:
    """The driver's loss_mask, not the policy mask, selects the tokens in the loss."""
    batch = make_batch(LENGTHS)
    batch.tokens["loss_mask"] = torch.ones_like(batch.tokens["policy_mask"])
    actual = make_actor().log_probs(batch)
    expected, _ = plain_log_probs(tiny_llama(VOCAB), batch)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_without_old_log_probs_the_ratio_is_one() -> None:
    """A single update per step needs no old log-probs: its loss is -mean(advantage)."""
    batch = make_batch(LENGTHS)
    del batch.tokens["old_log_probs"]
    actual = make_actor().update(batch)
    expected = -batch.tokens["advantages"][batch.tokens["policy_mask"]].mean()
    assert actual["actor/pg_loss"] == pytest.approx(float(expected), rel=1e-4)
    assert (actual["actor/ppo_kl"], actual["actor/clip_fraction"]) == (0, 0)


def test_line_17_a_non_finite_update_is_skipped_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """NaN never reaches weights or optimizer; the log names the groups it came from."""
    batch = make_batch(LENGTHS)
    actor = make_actor()
    before = weights(actor)
    batch.tokens["advantages"][batch.tokens["policy_mask"].nonzero()[0, 0]] = torch.nan
    metrics = actor.update(batch)
    assert metrics["actor/skipped_updates"] == 1
    assert "g0" in caplog.text
    assert all(torch.equal(weights(actor)[name], x) for name, x in before.items())
    fresh, untouched = make_batch(LENGTHS), make_actor()
    assert actor.update(fresh)["actor/skipped_updates"] == 0
    untouched.update(fresh)
    assert not torch.equal(weights(actor)["model.norm.weight"], before["model.norm.weight"])
    assert all(torch.equal(weights(untouched)[n], x) for n, x in weights(actor).items())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_line_17_a_gradient_that_is_not_finite_is_skipped(bad: float) -> None:
    """Even if the loss is finite: a single such value in a gradient is enough."""
    actor, before = make_actor(), weights(make_actor())
    for parameter in actor.model.trained_parameters().values():
        parameter.grad = torch.zeros_like(parameter)
    first = next(iter(actor.model.trained_parameters().values())).grad
    first.to_local().view(-1)[0] = bad
    step = actor.model.step(is_finite=True)
    assert step.is_faulty and step.grad_norm == pytest.approx(bad, nan_ok=True)
    assert all(torch.equal(weights(actor)[name], x) for name, x in before.items())
    assert actor.model.step(is_finite=False).is_faulty


def test_a_step_keeps_cached_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device memory is released only in `empty_cache`: allocating it again costs time."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    model = make_actor().model
    model.device = torch.device("cuda")
    model.step()
    assert not calls
    TrainerWorker.empty_cache(model)  # type: ignore[arg-type]
    assert calls == ["empty_cache"]


def test_a_batch_without_policy_tokens_updates_nothing_but_runs() -> None:
    """A rank without targets still takes part, with a loss and gradient of 0."""
    batch = make_batch(LENGTHS)
    batch.tokens["policy_mask"][:] = False
    batch.tokens["loss_weights"][:] = 0
    metrics = make_actor().update(batch)
    assert (metrics["actor/loss"], metrics["actor/grad_norm"]) == (0, 0)


def test_line_17_a_loss_that_is_not_finite_is_skipped_whatever_its_gradient() -> None:
    """On any rank, in any term of the loss."""
    actor, before = make_actor(), weights(make_actor())
    for parameter in actor.model.trained_parameters().values():
        parameter.grad = torch.ones_like(parameter)
    sums = torch.tensor([torch.inf, 1.0])
    batch = make_batch(LENGTHS)
    metrics = apply_update(actor.model, "actor", batch, [([0], batch)], ("loss", "weight"), [sums])
    assert metrics["actor/skipped_updates"] == 1
    assert all(torch.equal(weights(actor)[name], x) for name, x in before.items())
