"""Training in float16: the loss scale, and updates that need it or overflow with it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from example.tiny import tiny_llama
from tests.core.batches import make_batch
from tests.verl.training.ranks import VOCAB, save_tiny
from verl.config import ActorConfig, OptimConfig
from verl.ext.precision import GROWTH_INTERVAL, STATE, LossScale
from verl.training.actor import Actor, TokenBudgets
from verl.training.attention import PACKED
from verl.training.fsdp import FsdpModel, FsdpOptions
from verl.training.models import LogProbModel, blocks
from verl.training.shards import load_shards, save_shards

pytestmark = pytest.mark.usefixtures("single_rank")
LENGTHS = [12, 9, 17, 5]


def test_the_scale_is_that_of_torch() -> None:
    """Through overflows and long runs without any, it is exactly `torch.amp.GradScaler`'s."""
    ours, parameter = LossScale(), torch.nn.Parameter(torch.zeros(1))
    torchs = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD([parameter])
    overflows = {0, 1, 900, 901 + GROWTH_INTERVAL, 902 + 2 * GROWTH_INTERVAL + 5}
    for number in range(7000):
        torchs.scale(torch.ones(1))
        assert torchs.get_scale() == ours.value, number
        parameter.grad = torch.full((1,), torch.inf if number in overflows else 1.0)
        torchs.unscale_(optimizer)
        torchs.update()
        ours.update(number not in overflows)
    assert ours.value != LossScale().value


def make_actor(dtype: torch.dtype) -> Actor:
    lm = tiny_llama(VOCAB)
    lm.set_attn_implementation(PACKED)
    options = FsdpOptions(dtype, 10, OptimConfig(lr=1e-3))
    model = FsdpModel(LogProbModel(lm), blocks(lm, lm), torch.device("cpu"), options)
    return Actor(model, ActorConfig(), TokenBudgets(20, 20))


def scale_of(actor: Actor) -> LossScale:
    scale: LossScale = actor.model.more_state[STATE]
    return scale


def gradient(actor: Actor, factor: float = 1.0) -> torch.Tensor:
    """Return the clipped gradient of an update as a vector; advantages are scaled by `factor`."""
    batch, gradients = make_batch(LENGTHS), []
    batch.tokens["advantages"] *= factor

    def record(*_: object) -> None:
        parameters = actor.model.trained_parameters().values()
        gradients.append(torch.cat([p.grad.to_local().flatten() for p in parameters]))

    actor.model.optimizer.register_step_pre_hook(record)
    actor.update(batch)
    return gradients[0]


@pytest.mark.parametrize("factor", [1.0, 1e-5])
def test_a_float16_gradient_is_the_float32_one(factor: float) -> None:
    """In length and direction, even if most of it would be 0 in float16 without the scale."""
    exact, half = (gradient(make_actor(d), factor) for d in (torch.float32, torch.float16))
    assert torch.nn.functional.cosine_similarity(half, exact, dim=0) > 0.999
    assert float(half.norm()) == pytest.approx(float(exact.norm()), rel=0.01)


def test_after_an_overflow_the_scale_is_halved_and_training_continues() -> None:
    """An overflow is no fault, which the guard would count, and never reaches the weights."""
    actor, batch = make_actor(torch.float16), make_batch(LENGTHS)
    before = {name: x.clone() for name, x in actor.model.full_parameters("lm.")}
    scale_of(actor).value = 2.0**30
    metrics = actor.update(batch)
    assert metrics["actor/overflowed_updates"] == 1 and metrics["actor/skipped_updates"] == 0
    assert "actor/grad_norm" not in metrics and metrics["actor/loss_scale"] == 2.0**30
    now = dict(actor.model.full_parameters("lm."))
    assert all(torch.equal(now[name], x) for name, x in before.items())
    while metrics["actor/overflowed_updates"]:
        metrics = actor.update(batch)
    assert 1 < metrics["actor/loss_scale"] == scale_of(actor).value < 2.0**29
    assert metrics["actor/grad_norm"] > 0
    now = dict(actor.model.full_parameters("lm."))
    assert not torch.equal(now["model.norm.weight"], before["model.norm.weight"])


def test_what_a_smaller_scale_cannot_fix_is_a_fault() -> None:
    """That is a loss that is not finite, or a gradient that is not finite at scale 1."""
    actor, batch = make_actor(torch.float16), make_batch(LENGTHS)
    batch.tokens["advantages"][batch.tokens["policy_mask"].nonzero()[0, 0]] = torch.nan
    metrics = actor.update(batch)
    assert (metrics["actor/skipped_updates"], metrics["actor/overflowed_updates"]) == (1, 0)
    assert scale_of(actor) == LossScale()
    scale_of(actor).value = 1.0
    first = next(iter(actor.model.trained_parameters().values()))
    first.grad = torch.full_like(first, torch.inf)
    step = actor.model.step()
    assert step.is_faulty and not step.metrics()["overflowed_updates"]


def test_other_dtypes_have_no_scale() -> None:
    """Nor has a frozen model."""
    metrics = make_actor(torch.bfloat16).update(make_batch(LENGTHS))
    assert not {"actor/loss_scale", "actor/overflowed_updates"} & metrics.keys()
    lm = tiny_llama(VOCAB)
    frozen = FsdpOptions(torch.float16)
    model = FsdpModel(LogProbModel(lm), blocks(lm, lm), torch.device("cpu"), frozen)
    assert not model.more_state


def test_line_21_a_resumed_run_continues_with_its_scale(tmp_path: Path) -> None:
    """Updates after a checkpoint, or a rollback to it, are bit for bit the uninterrupted ones."""
    model_config = AutoConfig.from_pretrained(save_tiny(tmp_path / "model"))
    one, other, batch = make_actor(torch.float16), make_actor(torch.float16), make_batch(LENGTHS)
    scale_of(one).load_state_dict({"value": 2.0**11, "num_finite": GROWTH_INTERVAL - 2})
    one.update(batch)
    assert save_shards(tmp_path / "saved", {"actor": one.model}, model_config) == ""
    expected = [one.update(batch) for _ in range(2)]
    assert [x["actor/loss_scale"] for x in expected] == [2.0**11, 2.0**12]
    for actor in (one, other):
        load_shards(tmp_path / "saved", {"actor": actor.model})
        assert [actor.update(batch) for _ in range(2)] == expected


def test_a_checkpoint_of_another_dtype_is_resumed_with_a_new_scale(tmp_path: Path) -> None:
    """A run that continues in float16 on other GPUs finds no scale in the checkpoint."""
    model_config = AutoConfig.from_pretrained(save_tiny(tmp_path / "model"))
    wide, half = make_actor(torch.bfloat16), make_actor(torch.float16)
    assert save_shards(tmp_path / "saved", {"actor": wide.model}, model_config) == ""
    load_shards(tmp_path / "saved", {"actor": half.model})
    assert scale_of(half) == LossScale()
