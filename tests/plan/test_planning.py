"""The command: rates from a model or by hand, memory, the table, the best, and mistakes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from search_r1.plan.command import RateOptions, main
from search_r1.plan.placements import ROLLOUT, Costs, Placement, estimate_capacity, options_of
from search_r1.plan.workload import Batch, Dialogue, Turn
from tests.verl.preflight.memory.shapes import FACTS, shape_of
from verl.config import cli

BY_HAND = ["--decode=64:5200,256:15000", "--prefill-tokens-s=40000", "--train-tokens-s=9000",
           "--publish-s=2", "--adopt-s=1"]  # fmt: skip
SMALL = ["data.train_batch_size=16", "--cards=4", "--staleness=0,1", "--steps=2"]


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main([*words, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_rates_by_hand_need_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Every division of 4 cards, stale ones too unless shared; the best is close to the fastest."""
    found = planned(capsys, *SMALL, *BY_HAND)
    rows = found["placements"]
    assert isinstance(rows, list) and isinstance(found["best"], dict)
    tried = {(row["rollout_cards"], row["staleness"]) for row in rows}
    assert tried == {(0, 0), *((cards, stale) for cards in (1, 2, 3) for stale in (0, 1))}
    seconds = [row["step_s"] for row in rows]
    assert seconds == sorted(seconds)
    assert found["best"]["step_s"] <= 1.02 * seconds[0]
    assert found["best"]["rank_gb"] is None


def test_the_table_says_which_is_best(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With a model: a row each, memory included, and a sentence with the margin."""
    facts = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **FACTS["Qwen2.5-0.5B"]}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    model = f"actor_rollout_ref.model.path={tmp_path}"
    assert main([SMALL[0], model, *SMALL[1:], "--rollout-cards=0,2", "--top=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| cards | engines | stale |") and len(lines) == 2 + 3 + 3
    assert lines[-2].startswith("best: ") and "without staleness" in lines[-2]
    assert lines[-1].startswith("options: trainer.n_gpus_per_node=")


@pytest.mark.parametrize(
    ("words", "message"),
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
def test_mistakes_are_one_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is simulated."""
    assert main([*SMALL, *BY_HAND, *words]) == 2
    assert message in capsys.readouterr().err


def costs_of(size: str, *words: str) -> Costs:
    needed = ("data.train_files=-", "data.val_files=-", "actor_rollout_ref.model.path=-")
    config = cli.compose(["--config-name=grpo_trainer", *needed, *words])
    return Costs(config, RateOptions(), shape_of(size))


def batch(tokens: int) -> Batch:
    """512 x 5 dialogues of so many tokens, a quarter of them sampled."""
    turn = Turn(tokens // 4)
    return Batch((Dialogue(tokens - turn.tokens, (turn,)),) * 2560, 5)


def test_training_takes_what_was_computed_elsewhere() -> None:
    """Issue 17 counted 36 s of 8 cards for 3B and 512 x 5 dialogues of 1,300 tokens."""
    usual, load = "trainer.n_gpus_per_node=8", batch(1300)
    seconds = costs_of("Qwen2.5-3B", usual).train_s(load)
    assert 30 < seconds < 42
    few, small = "trainer.n_gpus_per_node=4", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu="
    assert costs_of("Qwen2.5-3B", few).train_s(load) == pytest.approx(2 * seconds)
    assert costs_of("Qwen2.5-3B", usual, f"{small}256").train_s(load) > 1.2 * seconds
    forward = "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=64"
    assert costs_of("Qwen2.5-3B", usual, forward).train_s(load) > 1.2 * seconds
    stale = costs_of("Qwen2.5-3B", usual, "actor_rollout_ref.rollout.max_staleness=1")
    assert stale.train_s(load) < 0.9 * seconds  # the engine's log-probs take the place of a pass


def test_ranks_that_compute_together_take_as_long(capsys: pytest.CaptureFixture[str]) -> None:
    """Budgets are of a rank, so that as many micro-batches are gathered for; cards for ranks come
    in whole sequence-parallel groups."""
    load, grouped = batch(1300), "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4"
    usual = costs_of("Qwen2.5-3B").train_s(load)
    assert costs_of("Qwen2.5-3B", grouped).train_s(load) == pytest.approx(usual)
    rows = planned(capsys, SMALL[0], grouped, *SMALL[1:], *BY_HAND)["placements"]
    assert isinstance(rows, list) and {row["train_cards"] for row in rows} == {4}


def test_the_critics_time_does_not_depend_on_the_policys_sizes() -> None:
    """A critic that is another model has an adapter of that model's sizes."""
    load, critic = batch(1300), shape_of("Qwen2.5-0.5B")
    ppo = ("algorithm.adv_estimator=gae", "critic.model.path=other", "critic.model.lora_rank=64")
    seconds = [
        replace(costs_of(policy, *ppo), critic=critic).train_s(load)
        - costs_of(policy).train_s(load)
        for policy in ("Qwen2.5-3B", "Qwen2.5-7B")
    ]
    assert seconds[0] == pytest.approx(seconds[1])


def test_a_critic_has_its_own_number_of_updates() -> None:
    """Which decides how often weights are gathered if its mini-batches are small."""
    load, ppo = batch(4), ("algorithm.adv_estimator=gae", "critic.n_gpus_per_node=8")
    few, many = (
        costs_of("Qwen2.5-3B", *ppo, f"critic.ppo_mini_batch_size={size}").train_s(load)
        for size in (256, 64)
    )
    assert many > 2 * few


def test_the_actor_waits_for_the_values_of_a_critic_on_its_own_cards() -> None:
    """Also if the critic's update is so fast that values and update take less time than its own."""
    actor = (
        "actor_rollout_ref.actor.old_log_probs=engine", "actor_rollout_ref.actor.use_kl_loss=false",
        "algorithm.kl_ctrl.kl_coef=0", "trainer.n_gpus_per_node=2",
    )  # fmt: skip
    critic = ("algorithm.adv_estimator=gae", "critic.n_gpus_per_node=6")
    load = batch(1300)
    both = costs_of("Qwen2.5-3B", *actor, *critic).train_s(load)
    assert both > 1.05 * costs_of("Qwen2.5-3B", *actor).train_s(load)


def test_a_critic_on_cards_of_its_own_works_beside_the_actor() -> None:
    """As many cards for each take as long as the slower of both, not as both in turn."""
    load, ppo = batch(1300), "algorithm.adv_estimator=gae"
    beside = costs_of("Qwen2.5-3B", ppo, "trainer.n_gpus_per_node=4", "critic.n_gpus_per_node=4")
    actor = costs_of("Qwen2.5-3B", "trainer.n_gpus_per_node=4").train_s(load)
    shared = costs_of("Qwen2.5-3B", ppo, "trainer.n_gpus_per_node=4").train_s(load)
    assert beside.train_s(load) == pytest.approx(max(actor, shared - actor))


def test_cards_of_a_critic_are_no_one_elses(capsys: pytest.CaptureFixture[str]) -> None:
    """Every division leaves them, and says so among its options."""
    words = ["algorithm.adv_estimator=gae", "critic.n_gpus_per_node=2"]
    found = planned(capsys, SMALL[0], *words, *SMALL[1:], *BY_HAND)
    rows = found["placements"]
    assert isinstance(rows, list)
    divided = {(row["rollout_cards"], row["train_cards"], row["critic_cards"]) for row in rows}
    assert divided == {(0, 2, 2), (1, 1, 2)}


def test_memory_decides_what_fits() -> None:
    """Ranks that share no card need less of it; some cards are too small; caches limit requests."""
    load = batch(1300)
    small = costs_of("Qwen2.5-3B")
    shared = estimate_capacity(Placement(0, 8, 0, None, 1), small, load, 84.8)
    split = estimate_capacity(Placement(4, 4, 0, None, 1), small, load, 84.8)
    assert shared.fits and split.fits
    assert shared.rank_gb is not None and split.rank_gb is not None
    assert split.rank_gb < shared.rank_gb
    assert split.engine_gb == pytest.approx(0.9 * 84.8)
    assert not estimate_capacity(Placement(0, 8, 0, None, 1), small, load, 10.0).fits
    tight = estimate_capacity(Placement(0, 8, 0, None, 1), small, batch(30_000), 84.8)
    assert tight.slots < shared.slots == 320


def test_an_engine_has_the_slots_of_the_run() -> None:
    """Its share of one step, in whole groups, also with more steps in progress."""
    costs = costs_of("Qwen2.5-3B", "data.train_batch_size=16", "data.val_batch_size=1")
    for card_gb in (0, 84.8):
        capacity = estimate_capacity(Placement(3, 5, 4, None, 1), costs, batch(1300), card_gb)
        assert capacity.slots == 6 * 5


def test_a_critics_own_card_counts_among_those_of_the_ranks() -> None:
    """A critic that is larger than the policy decides how much memory a rank needs."""
    ppo = ("algorithm.adv_estimator=gae", "critic.model.path=other", "critic.n_gpus_per_node=2")
    costs = replace(costs_of("Qwen2.5-0.5B", *ppo), critic=shape_of("Qwen2.5-7B"))
    capacity = estimate_capacity(Placement(2, 4, 0, None, 1, 2), costs, batch(1300), 300)
    assert capacity.rank_gb is not None and capacity.rank_gb > 16 * 7.6 / 2


def test_engines_of_a_lora_run_receive_the_adapter() -> None:
    """In float32, through files, instead of the whole model."""
    lora = costs_of("Qwen2.5-3B", "actor_rollout_ref.model.lora_rank=16")
    placed = replace(lora, config=options_of(Placement(0, 8, 0, None, 1), lora.config))
    size = 4 * shape_of("Qwen2.5-3B").adapter(16)
    assert (placed.publish_s, placed.adopt_s) == pytest.approx((size / 0.54e9, size / 1.4e9))


@pytest.mark.parametrize(
    "word",
    [f"{ROLLOUT}.name=transformers", f"{ROLLOUT}.url=[http://a:8000]", "data.rollouts=r"],
)
def test_a_run_of_other_engines_is_planned_with_vllms(word: str) -> None:
    """Whose rates are computed: also for a run that has servers of its own, or samples nothing."""
    placement, load = Placement(0, 8, 0, None, 1), batch(1300)
    config = costs_of("Qwen2.5-3B")
    other = costs_of("Qwen2.5-3B", word)
    assert estimate_capacity(placement, other, load, 84.8) == estimate_capacity(
        placement, config, load, 84.8
    )
