"""The canary of weights: real ranks and engines, healthy and with faults of each kind."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from example.tiny import tiny_llama
from tests.bad_models import whole_model
from tests.compare import is_computed
from tests.verl.trainer.local_run import InlineEngine, run_config, train
from tests.verl.training.ranks import VOCAB
from verl.engine import Score
from verl.errors import MismatchError
from verl.ext.canary import LENGTH, WeightCanary, choose_ids
from verl.model_files import load_tokenizer
from verl.rollout.rollouts import Scores
from verl.trainer.build import transfer_weights

IDS = tuple(torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist())
FAULTY_STEP = 3
LORA = ("actor_rollout_ref.model.lora_rank=4",)
Weights = dict[str, torch.Tensor]
Fault = Callable[[LlamaForCausalLM, Weights, Weights], None]
"""Changes the loaded model, given the weights of the step before and those at the start."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of policies that runs start from: with a head of its own, and with a tied one."""
    paths = {name: tmp_path_factory.mktemp(name) for name in ("untied", "tied")}
    for name, path in paths.items():
        tiny_llama(VOCAB, tie_word_embeddings=name == "tied").save_pretrained(path)
    return {name: str(path) for name, path in paths.items()}


@pytest.fixture
def model(models: dict[str, str]) -> str:
    return models["untied"]


def weights_of_before(lm: LlamaForCausalLM, before: Weights, first: Weights) -> None:
    lm.load_state_dict(before)


def one_old_tensor(lm: LlamaForCausalLM, before: Weights, first: Weights) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    lm.load_state_dict({**lm.state_dict(), name: before[name]})


def half_an_old_tensor(lm: LlamaForCausalLM, before: Weights, first: Weights) -> None:
    """As if one rank's shard was not sent."""
    name = "model.layers.0.self_attn.q_proj.weight"
    half = len(before[name]) // 2
    new = lm.state_dict()[name]
    lm.load_state_dict({**lm.state_dict(), name: torch.cat([new[:half], before[name][half:]])})


def stale_head(lm: LlamaForCausalLM, before: Weights, first: Weights) -> None:
    """Where the head is tied, a packed copy of it keeps its values."""
    lm.lm_head.weight = torch.nn.Parameter(before["lm_head.weight"].clone())


def no_adapter(lm: LlamaForCausalLM, before: Weights, first: Weights) -> None:
    """The base alone, without the adapter that was trained."""
    lm.load_state_dict(first)


def not_a_number(lm: LlamaForCausalLM, before: Weights, first: Weights) -> None:
    with torch.no_grad():
        lm.model.norm.weight[0] = torch.nan


def spoiled(fault: Fault | None, replica: int = 0) -> type[InlineEngine]:
    """Return an engine whose replica `replica` has a fault in one step."""

    class Spoiled(InlineEngine):
        first: Weights
        before: Weights

        async def update_weights(self, folder: str, version: int) -> None:
            self.before = _copy(self.model)
            self.first = self.before if version == 1 else self.first
            await super().update_weights(folder, version)
            # The first version has the weights of step 0. Engine `n` has the seed `n`.
            if fault and version == FAULTY_STEP + 1 and self.number == replica:
                fault(self.model, self.before, self.first)

        @property
        def number(self) -> int:
            return int(self._generator.initial_seed())

    return Spoiled


def _copy(lm: Any) -> Weights:
    return {name: tensor.clone() for name, tensor in lm.state_dict().items()}


def canary(**options: Any) -> WeightCanary:
    return WeightCanary(IDS, options.pop("dtype", "float32"), transfer_weights, **options)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [(weights_of_before, "untied"), (one_old_tensor, "untied"), (half_an_old_tensor, "untied"),
     (stale_head, "untied"), (stale_head, "tied"), (not_a_number, "tied")],
)  # fmt: skip
def test_line_29_each_fault_is_found_in_its_step(
    models: dict[str, str], tmp_path: Path, fault: Fault, kind: str
) -> None:
    """Of two engines the right one is named, with its step and both log-probs."""
    config = run_config(models[kind], tmp_path, "actor_rollout_ref.actor.optim.lr=1e-4")
    with pytest.raises(MismatchError) as caught:
        train(config, 4, 0, 2, engine_class=spoiled(fault, replica=1), transfer=canary())
    message = str(caught.value)
    assert message.startswith("engine 1 does not have the weights of step 3: log-probs of the")
    assert ("those of step 2" in message) is (fault is weights_of_before)
    assert "trainer -" in message and "expected at most" in message and "\n" not in message


@pytest.mark.parametrize("fault", [no_adapter, weights_of_before, one_old_tensor])
def test_line_29_an_adapter_that_is_not_applied_is_found_in_its_step(
    model: str, tmp_path: Path, fault: Fault
) -> None:
    """The adapter is merged into the weights that a transformers engine loads."""
    options = (*LORA, "actor_rollout_ref.actor.optim.lr=1e-3")
    with pytest.raises(MismatchError, match=r"engine 0 .*step 3"):
        train(run_config(model, tmp_path, *options), 4, 0, engine_class=spoiled(fault),
              transfer=canary())  # fmt: skip


@pytest.mark.parametrize("options", [(), LORA, ("actor_rollout_ref.rollout.max_staleness=1",)])
def test_a_healthy_run_is_the_same_with_and_without_it(
    model: str, tmp_path: Path, options: Sequence[str]
) -> None:
    """Bit for bit, with staleness too: it draws nothing at random and leaves no cache."""
    rows = []
    for transfer in (transfer_weights, canary()):
        config = run_config(model, tmp_path / str(len(rows)), *options)
        rows.append(train(config, 3, 0, 2, transfer=transfer))
    computed = [[{k: v for k, v in row.items() if is_computed(k)} for row in run] for run in rows]
    assert computed[0] == computed[1] and len(computed[0]) == 3


def test_an_engine_that_lags_is_compared_with_its_own_version(model: str, tmp_path: Path) -> None:
    """A fault of weights that load while the next step trains is found by the next transfer."""
    config = run_config(model, tmp_path, "actor_rollout_ref.rollout.max_staleness=1")
    with pytest.raises(MismatchError, match=r"engine 1 .*step 3"):
        train(config, 5, 0, 2, engine_class=spoiled(one_old_tensor, 1), transfer=canary())


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("trainer.compute_dtype=bfloat16",), LORA])
def test_200_healthy_steps_raise_no_alarm(
    model: str, tmp_path: Path, options: Sequence[str]
) -> None:
    """At a learning rate that changes the policy beyond recognition."""
    config = run_config(model, tmp_path, *options)
    dtype = "bfloat16" if options and "bfloat16" in options[0] else "float32"
    watch = canary(dtype=dtype)
    assert len(train(config, 200, 0, transfer=watch)) == 200
    assert watch.level is not None and watch.level < watch.limit(0)


class Fixed:
    """Ranks and engines with given log-probs at each step, per engine."""

    def __init__(self, dtype: str = "float32", **options: Any) -> None:
        self.version, self.scores = 0, Scores()
        self.canary = WeightCanary(IDS, dtype, self._transfer, **options)

    @property
    def group(self) -> Any:
        return SimpleNamespace(call=lambda *_: [torch.tensor([0.0, *self.ranks])])

    def _transfer(self, ranks: object, replicas: object, version: int) -> dict[str, float]:
        self.version = version
        return {"load": 0.0}

    def step(self, step: int, ranks: float, *engines: float | None) -> None:
        """Transfer weights; each engine has loaded them, and all tokens have one log-prob."""
        self.ranks, self.version = [ranks] * (LENGTH - 1), step
        self.scores.answers = [
            Score(i, self.version + 1, None if x is None else (x,) * (LENGTH - 1))
            for i, x in enumerate(engines)
        ]
        assert self.canary(self, self, step + 1).keys() == {"load", "canary"}


@pytest.mark.parametrize(("num_tokens", "is_alarm"), [(1, False), (3, False), (4, True)])
def test_rounding_that_grows_in_single_tokens_is_no_alarm(num_tokens: int, is_alarm: bool) -> None:
    """As in a step where a norm divides by almost nothing; weights change nearly all tokens."""
    run = Fixed("float32")
    run.step(0, -2.0, -2.0)
    run.ranks, log_probs = [-2.5] * (LENGTH - 1), [-2.5] * (LENGTH - 1)
    log_probs[:num_tokens] = [-2.52] * num_tokens
    run.scores.answers = [Score(0, run.version + 1, tuple(log_probs))]
    if not is_alarm:
        run.canary(run, run, 2)
        return
    with pytest.raises(MismatchError):
        run.canary(run, run, 2)


def test_an_engine_that_stays_the_same_to_the_last_bit_is_found_within_rounding() -> None:
    """In bfloat16 a step changes log-probs by less than rounding, but it does change them."""
    run = Fixed("bfloat16")
    run.step(0, -5.0, -5.03, -5.03)
    run.step(1, -5.002, -5.04, -5.02)
    run.step(2, -5.002, -5.04, -5.02)  # no update: nothing changed
    with pytest.raises(MismatchError, match=r"engine 1 .* step 3: .* those of step 1"):
        run.step(3, -5.004, -5.03, -5.02)


def test_rounding_is_measured_at_the_start() -> None:
    """Four times the first difference is allowed; more is named."""
    run = Fixed("bfloat16")
    run.step(0, -5.0, -5.01, -5.03)
    assert run.canary.limit(0) == pytest.approx(0.12)
    run.step(1, -5.5, -5.49, -5.61)
    with pytest.raises(MismatchError, match=r"engine 0 .*step 2"):
        run.step(2, -5.0, -5.13, -5.0)


def test_rounding_may_grow_but_neither_jump_nor_become_large() -> None:
    """Up to four times the latest differences, and never beyond a fixed bound."""
    run = Fixed()
    for step, difference in enumerate([1e-6, 8e-6, 3e-5, 1e-4, 3e-4, 9e-4]):
        run.step(step, -5.0 - step, -5.0 - step - difference)
    with pytest.raises(MismatchError, match=r"expected at most 0\.001"):
        run.step(6, -20.0, -20.0011)
    run = Fixed()
    run.step(0, -5.0, -5.000001)
    with pytest.raises(MismatchError, match="step 1"):
        run.step(1, -6.0, -6.0002)


def test_an_engine_that_computes_another_model_is_named_at_the_start() -> None:
    """A difference that rounding cannot explain is no level to measure against."""
    with pytest.raises(MismatchError, match=r"engine 1 and the trainer .* same weights: .* 3.5"):
        Fixed("bfloat16").step(0, -5.0, -5.0, -8.5)
    Fixed("bfloat16", is_approximate=True).step(0, -5.0, -5.0, -8.5)


def test_a_resumed_run_is_held_to_its_start(tmp_path: Path) -> None:
    """The fault of an adapter that a resumed engine lacks is not taken for rounding."""
    file = tmp_path / "run" / "canary.json"
    Fixed("bfloat16", file=file, setting="a").step(0, -5.0, -5.01)
    assert json.loads(file.read_text()) == {"setting": "a", "level": pytest.approx(0.01)}
    with pytest.raises(MismatchError, match=r"engine 0 .*step 7"):
        Fixed("bfloat16", file=file, setting="a").step(7, -5.0, -5.3)
    Fixed("bfloat16", file=file, setting="b").step(7, -5.0, -5.3)  # on another machine
    file.write_text("{")
    Fixed("bfloat16", file=file, setting="a").step(7, -5.0, -5.3)


def test_an_engine_without_scores_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """The others are still compared."""
    run = Fixed()
    with caplog.at_level(logging.WARNING):
        run.step(0, -5.0, None, -5.0)
        run.step(1, -6.0, None, -6.0)
    assert [record.args for record in caplog.records] == [(0,)]
    with pytest.raises(MismatchError, match="engine 1"):
        run.step(2, -7.0, None, -6.0)


def test_the_ids_are_the_same_for_a_seed_and_not_special(tmp_path: Path) -> None:
    """Every id can occur in a text."""
    tokenizer = load_tokenizer(str(whole_model(tmp_path)))
    ids = choose_ids(tokenizer, 3, LENGTH)
    assert ids == choose_ids(tokenizer, 3, LENGTH) != choose_ids(tokenizer, 4, LENGTH)
    assert len(ids) == LENGTH
    assert not {*ids} & {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
