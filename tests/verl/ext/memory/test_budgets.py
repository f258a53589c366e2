"""Token budgets that are left to the machine are the largest that fit, and keep a card busy."""

from __future__ import annotations

import logging
from operator import attrgetter
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.test_train_scripts import config_of
from tests.verl.ext.memory.shapes import shape_of
from tests.verl.ext.memory.test_presets import machine
from tests.verl.ext.memory.test_shortages import run
from verl.config import Config
from verl.ext.memory.budgets import ACTOR_BUDGET, CRITIC_BUDGET, enlarge, undecided_budgets
from verl.ext.memory.check import decide_memory, peak_rank_bytes
from verl.ext.memory.estimate import WARN_ABOVE, Setting, estimate
from verl.ext.model_shape import ModelShape
from verl.machine import Machine
from verl.preflight.undecided import with_options

LLAMA_8B = ModelShape.of(
    LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=False,
    )
)  # fmt: skip
FIRST_RUNS = {
    "8B-2x80": ("train_grpo.sh", {"N_GPUS": "2"}, LLAMA_8B, machine(2, 79.6, 512)),
    "3B-8x80": ("train_grpo.sh", {}, shape_of("Qwen2.5-3B"), machine(8, 79, 1000)),
    "7B-8x80": ("train_ppo.sh", {}, shape_of("Qwen2.5-7B"), machine(8, 79, 1000)),
    "0.5B-1x24": ("train_grpo.sh", {"N_GPUS": "1"}, shape_of("Qwen2.5-0.5B"), machine(1, 23.5, 64)),
}
"""Recipe, its variables, model and machine of runs that nobody tuned."""


def left_open(gpus: int, estimator: str = "grpo") -> Config:
    """Return a run whose budgets are null."""
    return with_options(run(gpus, estimator), {ACTOR_BUDGET: None, CRITIC_BUDGET: None})


def decide(config: Config, shape: ModelShape, here: Machine) -> tuple[Config, int]:
    """Return the decided options and the peak of a rank's card."""
    config.trainer.device = "cuda"
    setting = Setting(shape, shape, True, here)
    chosen = decide_memory(config, setting)
    return chosen, peak_rank_bytes(estimate(chosen, setting))


@pytest.mark.parametrize("name", FIRST_RUNS)
def test_a_first_run_fits(name: str, tmp_path: Path) -> None:
    """The recipes leave the budget open."""
    recipe, variables, shape, here = FIRST_RUNS[name]
    chosen, peak = decide(config_of(recipe, tmp_path, **variables), shape, here)
    assert peak <= WARN_ABOVE * here.devices[0].free
    assert attrgetter(ACTOR_BUDGET)(chosen) >= 8192


def test_a_card_that_is_large_enough_is_kept_busy_and_no_more() -> None:
    """16,384 tokens for the actor, twice as many for the critic, also on the largest card."""
    chosen, _ = decide(left_open(8, "gae"), shape_of("Qwen2.5-3B"), machine(8, 500, 2000))
    assert attrgetter(ACTOR_BUDGET)(chosen) == 16384
    assert attrgetter(CRITIC_BUDGET)(chosen) == 32768


def test_the_budget_is_the_largest_that_fits() -> None:
    """An eighth of the range more would take the tenth that stays free."""
    config = with_options(left_open(1), {"actor_rollout_ref.model.lora_rank": 8})
    config.actor_rollout_ref.rollout.gpu_memory_utilization = 0.4
    shape, here = shape_of("Qwen2.5-3B"), machine(1, 20, 500)
    chosen, peak = decide(config, shape, here)
    tokens = attrgetter(ACTOR_BUDGET)(chosen)
    assert 8192 < tokens < 16384 and peak <= WARN_ABOVE * here.devices[0].free
    more = with_options(chosen, {ACTOR_BUDGET: tokens + (16384 - 8192) // 8})
    needed = peak_rank_bytes(estimate(more, Setting(shape, shape, True, here)))
    assert needed > WARN_ABOVE * here.devices[0].free


def test_what_a_user_sets_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    """On a card that is far too small as well; nothing is said about it."""
    config = with_options(run(8, "gae"), {ACTOR_BUDGET: 5000, CRITIC_BUDGET: 50_000})
    with caplog.at_level(logging.INFO):
        for gib in (10, 500):
            chosen, _ = decide(config, shape_of("Qwen2.5-3B"), machine(8, gib, 2000))
            assert attrgetter(ACTOR_BUDGET)(chosen) == 5000
            assert attrgetter(CRITIC_BUDGET)(chosen) == 50_000
    assert "tokens of a micro-batch" not in caplog.text


def test_a_card_that_is_too_small_gets_one_dialogue() -> None:
    """Less would save nothing: a dialogue is never split, except over a group of ranks."""
    here, shape = machine(8, 5, 2000), shape_of("Qwen2.5-3B")
    for size, tokens in ((1, 4596), (4, 1149)):
        groups = {"actor_rollout_ref.actor.ulysses_sequence_parallel_size": size}
        chosen, _ = decide(with_options(left_open(8, "gae"), groups), shape, here)
        assert attrgetter(ACTOR_BUDGET)(chosen) == attrgetter(CRITIC_BUDGET)(chosen) == tokens


def test_without_an_estimate_a_budget_is_no_larger_than_by_default() -> None:
    """It stays 16,384 tokens."""
    config = left_open(1)
    config.trainer.device = "cuda"
    assert attrgetter(ACTOR_BUDGET)(decide_memory(config, None)) == 16384


def test_on_a_cpu_the_budget_stays_open() -> None:
    """Micro-batches there are those of the options, as before."""
    config = left_open(1, "gae")
    config.trainer.device = "cpu"
    assert undecided_budgets(decide_memory(config, None)) == undecided_budgets(config) != []


@pytest.mark.parametrize("limit", [4596, 5000, 9999, 16384, 10**6])
def test_enlarging_finds_the_limit(limit: int) -> None:
    """Compared with a scan over all steps; `fits` is asked at most four times."""
    config, asked = left_open(8), []

    def fits(candidate: Config) -> bool:
        asked.append(attrgetter(ACTOR_BUDGET)(candidate))
        return asked[-1] <= limit

    (budget,) = undecided_budgets(config)
    found = attrgetter(ACTOR_BUDGET)(enlarge(config, [budget], {ACTOR_BUDGET: 4596}, fits))
    steps = [4596 + (16384 - 4596) * step // 8 for step in range(9)]
    assert found == max(size for size in steps if size <= limit)
    assert len(asked) <= 4
