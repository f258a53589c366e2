"""The command: given and computed rates, memory, table, best placement, and error messages."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from search_r1.plan.command import RateOptions, main
from search_r1.plan.placements import (
    ROLLOUT,
    Capacity,
    Costs,
    Placement,
    estimate_capacity,
    placed_config,
)
from search_r1.plan.workload import Batch, Dialogue, Turn
from tests.verl.preflight.memory.shapes import FACTS, shape_of
from verl.config import cli

GIVEN_RATES = ["--decode=64:5200,256:15000", "--prefill-tokens-s=40000", "--train-tokens-s=9000",
           "--publish-s=2", "--adopt-s=1"]  # fmt: skip
SMALL = ["data.train_batch_size=16", "--cards=4", "--staleness=0,1", "--steps=2"]


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    """Run the command with --json; returns what it prints."""
    assert main([*args, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_given_rates_need_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Tries every division of 4 cards; the best placement is close to the fastest."""
    answer = run_json(capsys, *SMALL, *GIVEN_RATES)
    rows = answer["placements"]
    tried = {(row["rollout_cards"], row["staleness"]) for row in rows}
    assert tried == {(0, 0), *((cards, stale) for cards in (1, 2, 3) for stale in (0, 1))}
    seconds = [row["step_s"] for row in rows]
    assert seconds == sorted(seconds)
    assert answer["best"]["step_s"] <= 1.02 * seconds[0]
    assert answer["best"]["rank_gb"] is None


def test_the_best_placement_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """After the table, with its margins and options. Rates and memory are computed here."""
    facts = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **FACTS["Qwen2.5-0.5B"]}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    model = f"actor_rollout_ref.model.path={tmp_path}"
    assert main([SMALL[0], model, *SMALL[1:], "--rollout-cards=0,2", "--top=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| cards | engines | stale |") and len(lines) == 2 + 3 + 3
    assert lines[-2].startswith("best: ") and "without staleness" in lines[-2]
    assert lines[-1].startswith("options: trainer.n_gpus_per_node=")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--rollout-cards=4"],
            "--rollout-cards: got 4, with engines of [1] cards, expected whole",
        ),
        (["--staleness=0,x"], "--staleness: got '0,x', expected numbers of 0 or more"),
        (["--staleness=0.5"], "--staleness: got '0.5', expected whole numbers"),
        (["--searches=1,1,1,1"], "--searches: got '1,1,1,1', expected shares of 0 to 2 searches"),
        (["--search-p99=0.1"], "--search-p99: got 0.1, expected the median, 0.5, or more"),
        (["--preset=nope"], "--config-name: got nope"),
        (["--run=/nowhere"], "--run: got /nowhere, expected a folder with config.yaml"),
        (["--run=.", "--preset=ppo_trainer"], "--preset: got ppo_trainer with --run"),
        (["--decode=", "--publish-s=1"], "actor_rollout_ref.model.path: got -, whose config.json"),
        (["--tensor-parallel=1,2"], "--tensor-parallel: got 1,2, expected one size"),
    ],
)
def test_invalid_options_are_refused(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each with one message, before anything is simulated."""
    assert main([*SMALL, *GIVEN_RATES, *args]) == 2
    assert message in capsys.readouterr().err


def costs_of(size: str, *options: str) -> Costs:
    """Return the costs of a GRPO run with a model of this size."""
    needed = ("data.train_files=-", "data.val_files=-", "actor_rollout_ref.model.path=-")
    config = cli.compose(["--config-name=grpo_trainer", *needed, *options])
    return Costs(config, RateOptions(), shape_of(size))


def batch(tokens: int) -> Batch:
    """Return 512 x 5 dialogues of `tokens` tokens, a quarter of them sampled."""
    turn = Turn(tokens // 4)
    return Batch((Dialogue(tokens - turn.tokens, (turn,)),) * 2560, 5)


BATCH = batch(1300)
SHARED = Placement(0, 8, 0, None, 1)


def train_s(size: str, *options: str) -> float:
    """Return the seconds of training on `BATCH`."""
    return costs_of(size, *options).train_s(BATCH)


def capacity(
    costs: Costs, placement: Placement = SHARED, batch: Batch = BATCH, card_gb: float = 84.8
) -> Capacity:
    """Return the capacity of a placement with cards of 79 GiB."""
    return estimate_capacity(placement, costs, batch, card_gb)


def test_training_takes_the_time_of_its_flops() -> None:
    """36 s on 8 cards at 400 TFLOP/s by a separate count, for 3B and 1,300 tokens per dialogue."""
    seconds = train_s("Qwen2.5-3B", "trainer.n_gpus_per_node=8")
    assert 30 < seconds < 42
    assert train_s("Qwen2.5-3B", "trainer.n_gpus_per_node=4") == pytest.approx(2 * seconds)
    small_updates = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256"
    assert train_s("Qwen2.5-3B", small_updates) > 1.2 * seconds
    small_forwards = f"{ROLLOUT}.log_prob_max_token_len_per_gpu=64"
    assert train_s("Qwen2.5-3B", small_forwards) > 1.2 * seconds
    # The engine's log-probs replace a forward pass.
    assert train_s("Qwen2.5-3B", f"{ROLLOUT}.max_staleness=1") < 0.9 * seconds


def test_sequence_parallel_ranks_take_as_long(capsys: pytest.CaptureFixture[str]) -> None:
    """Token budgets are per rank. Only whole sequence-parallel groups get cards."""
    grouped = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4"
    assert train_s("Qwen2.5-3B", grouped) == pytest.approx(train_s("Qwen2.5-3B"))
    rows = run_json(capsys, SMALL[0], grouped, *SMALL[1:], *GIVEN_RATES)["placements"]
    assert {row["train_cards"] for row in rows} == {4}


def test_a_critics_time_does_not_depend_on_the_policy() -> None:
    """If the critic is another model, so is the base of its adapter."""
    critic = shape_of("Qwen2.5-0.5B")
    ppo = ("algorithm.adv_estimator=gae", "critic.model.path=other", "critic.model.lora_rank=64")
    seconds = [
        replace(costs_of(policy, *ppo), critic=critic).train_s(BATCH) - train_s(policy)
        for policy in ("Qwen2.5-3B", "Qwen2.5-7B")
    ]
    assert seconds[0] == pytest.approx(seconds[1])


def test_a_critic_has_its_own_number_of_updates() -> None:
    """Small mini-batches of the critic are limited by gathering its weights."""
    short, ppo = batch(4), ("algorithm.adv_estimator=gae", "critic.n_gpus_per_node=8")
    few, many = (
        costs_of("Qwen2.5-3B", *ppo, f"critic.ppo_mini_batch_size={size}").train_s(short)
        for size in (256, 64)
    )
    assert many > 2 * few


def test_the_actor_waits_for_the_values_of_a_separate_critic() -> None:
    """Even if the critic's values and updates together take less time than the actor's updates."""
    actor = (
        "actor_rollout_ref.actor.old_log_probs=engine", "actor_rollout_ref.actor.use_kl_loss=false",
        "algorithm.kl_ctrl.kl_coef=0", "trainer.n_gpus_per_node=2",
    )  # fmt: skip
    critic = ("algorithm.adv_estimator=gae", "critic.n_gpus_per_node=6")
    assert train_s("Qwen2.5-3B", *actor, *critic) > 1.05 * train_s("Qwen2.5-3B", *actor)


def test_a_separate_critic_works_at_the_same_time_as_the_actor() -> None:
    """With equal numbers of cards both take as long as the slower one."""
    ppo, cards = "algorithm.adv_estimator=gae", "trainer.n_gpus_per_node=4"
    actor, shared = train_s("Qwen2.5-3B", cards), train_s("Qwen2.5-3B", ppo, cards)
    separate = train_s("Qwen2.5-3B", ppo, cards, "critic.n_gpus_per_node=4")
    assert separate == pytest.approx(max(actor, shared - actor))


def test_the_cards_of_a_separate_critic_are_reserved(capsys: pytest.CaptureFixture[str]) -> None:
    """Every placement leaves them to the critic."""
    options = ["algorithm.adv_estimator=gae", "critic.n_gpus_per_node=2"]
    rows = run_json(capsys, SMALL[0], *options, *SMALL[1:], *GIVEN_RATES)["placements"]
    divided = {(row["rollout_cards"], row["train_cards"], row["critic_cards"]) for row in rows}
    assert divided == {(0, 2, 2), (1, 1, 2)}


def test_memory_decides_what_fits() -> None:
    """Ranks on separate cards need less; small cards do not fit; caches limit the slots."""
    costs = costs_of("Qwen2.5-3B")
    shared, split = capacity(costs), capacity(costs, Placement(4, 4, 0, None, 1))
    assert shared.fits and split.fits
    assert shared.rank_gb is not None and split.rank_gb is not None
    assert split.rank_gb < shared.rank_gb
    assert split.engine_gb == pytest.approx(0.9 * 84.8)
    assert not capacity(costs, card_gb=10.0).fits
    assert capacity(costs, batch=batch(30_000)).slots < shared.slots == 320


def test_an_engine_has_the_slots_that_a_run_gives_it() -> None:
    """Its share of one step, in whole groups, however many steps are in progress."""
    costs = costs_of("Qwen2.5-3B", "data.train_batch_size=16", "data.val_batch_size=1")
    for card_gb in (0, 84.8):
        assert capacity(costs, Placement(3, 5, 4, None, 1), card_gb=card_gb).slots == 6 * 5


def test_the_memory_of_a_separate_critic_counts() -> None:
    """If the critic is larger than the policy, its ranks need the most memory."""
    ppo = ("algorithm.adv_estimator=gae", "critic.model.path=other", "critic.n_gpus_per_node=2")
    costs = replace(costs_of("Qwen2.5-0.5B", *ppo), critic=shape_of("Qwen2.5-7B"))
    rank_gb = capacity(costs, Placement(2, 4, 0, None, 1, critic_cards=2), card_gb=300).rank_gb
    assert rank_gb is not None and rank_gb > 16 * 7.6 / 2


def test_only_the_adapter_is_transferred() -> None:
    """In float32, through files, if the engines take adapters."""
    lora = costs_of("Qwen2.5-3B", "actor_rollout_ref.model.lora_rank=16")
    placed = replace(lora, config=placed_config(SHARED, lora.config))
    size = 4 * shape_of("Qwen2.5-3B").adapter(16)
    assert (placed.publish_s, placed.adopt_s) == pytest.approx((size / 0.54e9, size / 1.4e9))


@pytest.mark.parametrize(
    "option",
    [f"{ROLLOUT}.name=transformers", f"{ROLLOUT}.url=[http://a:8000]", "data.rollouts=r"],
)
def test_every_run_is_planned_with_vllm_engines(option: str) -> None:
    """Also one with another engine, with servers of the user, or with recorded trajectories."""
    assert capacity(costs_of("Qwen2.5-3B", option)) == capacity(costs_of("Qwen2.5-3B"))
