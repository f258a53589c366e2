"""From scores to advantages and updates: shaping, clipping, `compat`, mini-batches, passes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from verl.batch import TokenBatch
from verl.config import Config
from verl.core_algos.advantages import DIVIDED, STD_EPSILON
from verl.core_algos.jagged import segment_sum
from verl.core_algos.kl import AdaptiveKLController, FixedKLController
from verl.errors import ConfigError
from verl.monitor.performance import Timings
from verl.packing import PREFIXES
from verl.rewards.interface import Reward
from verl.trainer.collect import Samples
from verl.trainer.learn import Learner, add_advantages, assemble, mini_batches, subtract_kl
from verl.training.devices import PeakMemory
from verl.types import Draw, Origin, Prompt, Segment, Trajectory

PROMPT = Prompt("nq#0", (1, 2), "nq", ("gold",))
Turns = Sequence[tuple[int, int]]
"""For each turn of a trajectory: its policy tokens, and the observation tokens after it."""


def trajectory(turns: Turns, group: str = "g") -> Trajectory:
    """Return a trajectory of a prompt and turns; the observation of the last turn is left out."""
    segments = [Segment(Origin.PROMPT, PROMPT.ids)]
    for number, (num_policy, num_observed) in enumerate(turns):
        segments.append(Segment(Origin.POLICY, (5,) * num_policy, "x", (-1.0,) * num_policy))
        if number + 1 < len(turns):
            segments.append(Segment(Origin.OBSERVATION, (7,) * num_observed, "doc"))
    return Trajectory(PROMPT, segments, draw=Draw(group))


def samples_of(dialogues: Sequence[Turns], scores: Sequence[float]) -> Samples:
    trajectories = [trajectory(t, group=f"g{i // 2}") for i, t in enumerate(dialogues)]
    return Samples(trajectories, [Reward(score) for score in scores])


def prepared(config: Config, samples: Samples, seed: int = 0) -> TokenBatch:
    """Return the assembled batch with random values in the columns that ranks would compute."""
    batch = assemble(samples, config)
    generator = torch.Generator().manual_seed(seed)
    value_mask = batch.tokens.get("value_mask", batch.tokens["loss_mask"])
    for name in ("values", "old_log_probs", "ref_log_probs"):
        noise = torch.randn(batch.num_tokens, generator=generator)
        mask = value_mask if name == "values" else batch.tokens["loss_mask"]
        batch.tokens[name] = torch.where(mask, noise, 0.0)
    return batch


@dataclass
class OriginalGae:
    """Advantages of the original Search-R1's PPO, by loops over responses with observations."""

    gamma: float
    lam: float
    beta: float

    def of(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return whitened advantages and returns, (num_tokens,), 0 in the prompt."""
        names = ("response_mask", "policy_mask", "values", "old_log_probs", "ref_log_probs")
        columns = {name: batch.tokens[name].double().tolist() for name in names}
        raw, returns = torch.zeros(2, batch.num_tokens, dtype=torch.float64)
        for i in range(len(batch)):
            first, last = int(batch.offsets[i]), int(batch.offsets[i + 1])
            response = [t for t in range(first, last) if columns["response_mask"][t]]
            running, value_after = 0.0, 0.0
            for t in reversed(response):
                kl = columns["old_log_probs"][t] - columns["ref_log_probs"][t]
                reward = -self.beta * kl * columns["policy_mask"][t]
                reward += float(batch.rows["scores"][i]) if t == response[-1] else 0.0
                delta = reward + self.gamma * value_after - columns["values"][t]
                running = delta + self.gamma * self.lam * running
                raw[t], returns[t] = running, running + columns["values"][t]
                value_after = columns["values"][t]
        mask = batch.tokens["response_mask"]
        return self.whiten(raw, mask), returns

    def whiten(self, raw: Tensor, mask: Tensor) -> Tensor:
        chosen = raw[mask].numpy()
        scaled = (chosen - chosen.mean()) / math.sqrt(chosen.var(ddof=1) + 1e-8)
        return torch.zeros_like(raw).masked_scatter(mask, torch.from_numpy(scaled))


turns = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=3)


@given(st.lists(turns, min_size=2, max_size=5), st.data())
def test_compat_gives_the_originals_advantages(dialogues: list[Turns], data: st.DataObject) -> None:
    """They equal those of a loop over whole responses, whitened over whole responses."""
    config = Config()
    config.algorithm.gamma, config.algorithm.lam = 0.99, 0.95
    config.compat = "search_r1"
    scores = [data.draw(st.sampled_from([0.0, 1.0])) for _ in dialogues]
    batch = prepared(config, samples_of(dialogues, scores))
    advantages, returns = OriginalGae(0.99, 0.95, 0.1).of(batch)
    add_advantages(batch, config, FixedKLController(0.1))
    policy = batch.tokens["policy_mask"]
    close = {"rtol": 1e-4, "atol": 1e-4}
    found = batch.tokens["advantages"].double()
    torch.testing.assert_close(found[policy], advantages[policy], **close)
    torch.testing.assert_close(batch.tokens["returns"].double(), returns, **close)
    assert not batch.tokens["advantages"][~policy].any()


DIALOGUES: list[Turns] = [[(2, 3), (1, 0)], [(4, 0)], [(1, 2), (2, 5), (3, 0)], [(3, 1), (1, 0)]]


def test_compat_changes_nothing_without_a_critic() -> None:
    """Group estimators never use observations, so compat does not change them."""
    results = []
    for compat in ("none", "search_r1"):
        config = Config(compat=compat)
        config.algorithm.adv_estimator = "grpo"
        batch = prepared(config, samples_of(DIALOGUES, [1, 0, 0, 1]))
        assert "value_mask" not in batch.tokens
        add_advantages(batch, config, FixedKLController(0.1))
        results.append(batch.tokens["advantages"])
    assert torch.equal(*results)


def test_policy_and_critic_have_separate_token_weights() -> None:
    """With GAE over all tokens, the critic has weights on all tokens of the response."""
    config = Config(compat="search_r1")
    batch = prepared(config, samples_of(DIALOGUES, [1, 0, 0, 1]))
    (mini,) = mini_batches(batch, config, 4, 1, step=1)
    for weights, mask in (("loss_weights", "policy_mask"), ("value_weights", "response_mask")):
        assert torch.equal(mini.tokens[weights] > 0, mini.tokens[mask])
        assert float(mini.tokens[weights].sum()) == pytest.approx(1.0)


def test_overlong_trajectories_lose_score_by_policy_tokens() -> None:
    """The penalty counts policy tokens only, not observations, and is logged."""
    config = Config()
    config.algorithm.adv_estimator, config.algorithm.kl_ctrl.kl_coef = "reinforce", 0.0
    shaping = config.algorithm.overlong_buffer
    shaping.enable, shaping.penalty_factor = True, 0.5
    config.max_turns, config.data.max_response_length = 4, 1
    batch = prepared(config, samples_of(DIALOGUES, [1, 0, 0, 1]))
    metrics = add_advantages(batch, config, FixedKLController(0.0))
    # 3, 4, 6 and 4 policy tokens; the last of 5, a fifth, costs all
    penalties = [0.0, 0.0, 0.5, 0.0]
    last = batch.offsets[1:] - 1
    expected = [score - penalty for score, penalty in zip([1, 0, 0, 1], penalties, strict=True)]
    assert batch.tokens["advantages"][last].tolist() == pytest.approx(expected)
    assert metrics["reward/overlong_penalty"] == pytest.approx(np.mean(penalties))
    assert metrics["reward/overlong_share"] == 0.25


def test_overlong_bounds_follow_the_budgets() -> None:
    """The maximum: all turns at full length, up to the context."""
    config = Config()
    config.max_turns, config.data.max_response_length = 2, 500
    assert config.max_policy_tokens == 1500
    config.max_turns = 100
    assert config.max_policy_tokens == config.data.max_model_len


def test_the_norm_length_is_what_a_whole_trajectory_may_sample() -> None:
    """Dr.GRPO's constant counts all turns, so each token has the same weight in every batch."""
    config = Config()
    config.actor_rollout_ref.actor.loss_agg_mode = "seq-mean-token-sum-norm"
    config.max_turns, config.data.max_response_length = 3, 25
    batch = prepared(config, samples_of(DIALOGUES, [1, 0, 0, 1]))
    (mini,) = mini_batches(batch, config, 4, 1, step=1)
    own = mini.tokens["loss_weights"][mini.tokens["policy_mask"]]
    assert own.tolist() == pytest.approx([1 / (4 * 100)] * len(own))


def small(scores: Sequence[float]) -> TokenBatch:
    """Return a batch of one-token dialogues in groups of two, all of one data source."""
    return prepared(Config(), samples_of([[(1, 0)]] * len(scores), scores))


def test_mini_batches_are_each_epoch_s_own_permutation() -> None:
    """Every sequence once per epoch, in an order that depends only on seed and step."""
    batch, config = small([0.0] * 10), Config()
    batch.tokens["position"] = torch.arange(batch.num_tokens)

    def orders(step: int, seed: int = 0, epochs: int = 3) -> list[list[int]]:
        config.trainer.seed = seed
        minis = mini_batches(batch, config, 4, epochs, step)
        assert [len(mini) for mini in minis] == [4, 4, 2] * epochs
        drawn = [int(m.tokens["position"][start]) for m in minis for start in m.offsets[:-1]]
        indices = [batch.offsets[:-1].tolist().index(position) for position in drawn]
        return [indices[i : i + 10] for i in range(0, len(indices), 10)]

    first = orders(1)
    assert all(sorted(order) == list(range(10)) for order in first)
    assert len({tuple(x) for x in (range(10), *first, *orders(2), *orders(1, seed=1))}) == 10
    assert orders(1) == first
    # Groups of two stay together, so their common prompt is computed once.
    assert all(b == a + 1 for order in first for a, b in zip(order[::2], order[1::2], strict=True))


class Ranks:
    """Records the sizes of mini-batches, and the order of calls and waits."""

    def __init__(self) -> None:
        self.sizes: dict[str, list[int]] = {"actor": [], "critic": []}
        self.log: list[str] = []
        self.groups = {"actor": "ranks", "critic": "ranks"}

    def group_of(self, role: str) -> str:
        return self.groups[role]

    def update(self, role: str, mini: TokenBatch) -> dict[str, float]:
        self.sizes[role].append(len(mini))
        self.log.append(role)
        return {"size": float(len(mini))}

    def begin_updates(
        self, role: str, minis: Sequence[TokenBatch]
    ) -> Callable[[], list[dict[str, float]]]:
        self.sizes[role] += map(len, minis)
        self.log.append(f"begin updates of {role}")
        return self.pending(role, [{"value": 2.0 * len(mini)} for mini in minis])

    def pending(self, role: str, result: Any) -> Callable[[], Any]:
        def wait() -> Any:
            self.log.append(f"wait for {role}")
            return result

        return wait

    def begin_forward(self, role: str, batch: TokenBatch) -> Callable[[], Tensor]:
        self.log.append(f"begin {role}")
        value = {"actor": -1.0, "reference": -2.0, "critic": -3.0}[role]
        return self.pending(role, torch.full((batch.num_tokens,), value))

    def take_peak_memory(self, role: str) -> PeakMemory:
        return PeakMemory(1, 2)


def learner_of(estimator: str = "gae") -> tuple[Learner, Ranks]:
    config, ranks = Config(), Ranks()
    config.algorithm.adv_estimator = estimator
    config.actor_rollout_ref.model.path = "/nowhere"
    config.data.train_batch_size = config.actor_rollout_ref.actor.ppo_mini_batch_size = 4
    return Learner(config, ranks, FixedKLController(0.0)), ranks  # type: ignore[arg-type]


def test_policy_and_critic_have_separate_epochs() -> None:
    """They also have separate mini-batch sizes."""
    learner, ranks = learner_of()
    actor, critic = learner.config.actor_rollout_ref.actor, learner.config.critic
    actor.ppo_epochs = 3
    critic.ppo_epochs, critic.ppo_mini_batch_size = 2, 3
    batch = small([1.0, 0.0, 2.0, 0.0])
    batch.tokens |= {"advantages": torch.ones(batch.num_tokens)}
    assert learner.update(batch, 1, Timings()) == {"size": 4.0, "value": 4.0}
    assert ranks.sizes == {"actor": [4] * 3, "critic": [3, 1] * 2}


@pytest.mark.parametrize(
    ("estimator", "epochs", "in_loss", "kl_coef", "expected"),
    [
        ("grpo", 1, False, 0.0, {}),
        ("grpo", 2, False, 0.0, {"old_log_probs": -1.0}),
        ("grpo", 1, True, 0.0, {"ref_log_probs": -2.0}),
        ("grpo", 1, False, 0.1, {"old_log_probs": -1.0, "ref_log_probs": -2.0}),
        ("gae", 1, False, 0.0, {"values": -3.0}),
    ],
)
def test_each_pass_is_made_only_if_needed_and_by_the_right_model(
    estimator: str, epochs: int, in_loss: bool, kl_coef: float, expected: dict[str, float]
) -> None:
    """Reference log-probs come from the reference; a single update needs no old ones."""
    learner, _ = learner_of(estimator)
    actor = learner.config.actor_rollout_ref.actor
    actor.ppo_epochs, actor.use_kl_loss, actor.kl_loss_coef = epochs, in_loss, 0.1
    learner.config.algorithm.kl_ctrl.kl_coef = kl_coef
    batch = assemble(samples_of([[(1, 0)]] * 4, [0.0] * 4), learner.config)
    before = set(batch.tokens)
    learner.prepare(batch, Timings())
    assert {x: float(batch.tokens[x][0]) for x in set(batch.tokens) - before} == expected


def test_all_work_of_the_ranks_is_counted() -> None:
    """Each pass and each mini-batch is counted under its phase and for its model."""
    learner, _ = learner_of()
    config, counted = learner.config, list[tuple[str, str, int]]()
    learner.count_pass = lambda phase, model, batch: counted.append((phase, model, len(batch)))
    config.algorithm.kl_ctrl.kl_coef = 0.1
    config.actor_rollout_ref.actor.ppo_mini_batch_size, config.critic.ppo_mini_batch_size = 2, 3
    batch = small([1.0, 0.0, 2.0, 0.0])
    batch.tokens["advantages"] = torch.ones(batch.num_tokens)
    learner.prepare(batch, Timings())
    learner.update(batch, 1, Timings())
    assert counted == [
        ("values", "critic", 4), ("old_log_prob", "policy", 4), ("old_log_prob", "reference", 4),
        ("update_critic", "critic", 3), ("update_critic", "critic", 1),
        ("update_actor", "policy", 2), ("update_actor", "policy", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(("estimator", "updates"), [("gae", [0, 0, 1]), ("grpo", [1, 1, 1])])
def test_the_policy_waits_while_a_critic_warms_up(estimator: str, updates: list[int]) -> None:
    """It waits for `critic_warmup` steps, and only if there is a critic."""
    learner, ranks = learner_of(estimator)
    learner.config.trainer.critic_warmup = 2
    batch = small([1.0, 0.0, 2.0, 0.0])
    batch.tokens |= {"advantages": torch.ones(batch.num_tokens)}
    num_updates = []
    for step in (1, 2, 3):
        ranks.sizes["actor"].clear()
        learner.update_actor(batch, step)
        num_updates.append(len(ranks.sizes["actor"]))
    assert num_updates == updates


@pytest.mark.parametrize(("entropy_coeff", "sizes", "mean"), [(0.0, [2, 0], 2), (0.1, [2, 2], 2)])
def test_trajectories_without_gradient_are_skipped(
    entropy_coeff: float, sizes: list[int], mean: float
) -> None:
    """An empty mini-batch is still an update, but does not count in the metrics."""
    learner, ranks = learner_of("grpo")
    actor = learner.config.actor_rollout_ref.actor
    actor.ppo_mini_batch_size, actor.entropy_coeff = 2, entropy_coeff
    batch = small([1.0, 0.0, 2.0, 0.0])
    first, *_ = mini_batches(batch, learner.config, 2, 1, step=1)
    has_gradient = torch.isin(batch.tokens["values"], first.tokens["values"])
    batch.tokens["advantages"] = (has_gradient & batch.tokens["policy_mask"]).float()
    assert learner.update_actor(batch, step=1) == {"size": mean}
    assert ranks.sizes["actor"] == sizes


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "dr_grpo", "rloo"])
@pytest.mark.parametrize("is_divided", [True, False])
def test_kl_alone_is_never_divided_by_its_own_deviation(name: str, is_divided: bool) -> None:
    """A group of equal scores would get advantages of about 1 from it, at any coefficient.

    Other groups, and estimators without a division, keep the KL in their reward.
    """
    config = Config()
    config.algorithm.adv_estimator = name
    config.algorithm.norm_adv_by_std_in_grpo = is_divided
    assert config.kl_in_reward
    batch = prepared(config, samples_of([[(3, 0)]] * 6, [1, 1, 0, 1, 0, 0]))
    add_advantages(batch, config, FixedKLController(0.001))
    kl = batch.tokens["old_log_probs"] - batch.tokens["ref_log_probs"]
    kl = segment_sum(kl * batch.tokens["loss_mask"], batch.offsets)
    returns = batch.rows["scores"] - 0.001 * kl
    found = segment_sum(batch.tokens["advantages"], batch.offsets) / 3
    is_zero = name in DIVIDED and is_divided
    for group in (slice(0, 2), slice(4, 6)):
        assert found[group].any() != is_zero
        assert float(found[group].abs().max()) < 0.02
    if name == "grpo":
        mixed = returns[2:4].double()
        expected = (mixed - mixed.mean()) / (mixed.std() + STD_EPSILON if is_divided else 1.0)
        assert torch.allclose(found[2:4].double(), expected, atol=1e-5)


def test_a_step_s_kl_is_weighed_by_the_coefficient_from_before_it() -> None:
    """The controller is updated with the step's KL only after that KL was subtracted."""
    controller, batch = AdaptiveKLController(0.5, target=0.001, horizon=10), small([1.0] * 4)
    rewards = torch.zeros(batch.num_tokens)
    penalised, metrics = subtract_kl(rewards, batch, "kl", controller)
    kl = batch.tokens["old_log_probs"] - batch.tokens["ref_log_probs"]
    assert torch.allclose(penalised, -0.5 * kl * batch.tokens["loss_mask"])
    assert metrics["critic/kl_coef"] == 0.5 != controller.value


class NoRanks:
    """Ranks on which no log-probs of the policy may be computed."""

    def begin_forward(self, role: str, batch: TokenBatch) -> Callable[[], Tensor]:
        assert role != "actor", "a forward pass although the engine reported the log-probs"
        return lambda: torch.zeros(batch.num_tokens)


def test_the_engine_s_log_probs_are_the_old_ones_without_a_pass() -> None:
    """No forward pass is needed, even with several updates per step and KL in the reward."""
    config = Config()
    config.actor_rollout_ref.actor.old_log_probs = "engine"
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 1
    assert config.updates_per_step > 1
    batch = assemble(samples_of(DIALOGUES, [1.0] * 4), config)
    Learner(config, NoRanks(), FixedKLController(0.0)).compute_log_probs(batch)  # type: ignore[arg-type]
    old, policy = batch.tokens["old_log_probs"], batch.tokens["policy_mask"]
    assert old.tolist() == torch.where(policy, -1.0, 0.0).tolist()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("old_log_probs", "engine"), ("rollout_correction", {"rollout_is": "token"}),
        ("rollout_correction", {"rollout_mask_threshold": 2.0}),
    ],
)  # fmt: skip
def test_an_engine_without_log_probs_is_refused_where_needed(option: str, value: object) -> None:
    """One error line instead of a NaN loss, or of a loss that masks every token."""
    config = Config()
    setattr(config.actor_rollout_ref.actor, option, value)
    batch = assemble(samples_of(DIALOGUES, [1.0] * 4), config)
    batch.tokens["rollout_log_probs"] *= torch.nan
    with pytest.raises(ConfigError, match="old_log_probs=recompute"):
        Learner(config, NoRanks(), FixedKLController(0.0)).compute_log_probs(batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_on", [True, False])
def test_prompts_of_groups_are_shared_unless_that_is_off(is_on: bool) -> None:
    """Two of every six tokens are the prompt, which both members of a group share."""
    config = Config()
    config.trainer.share_prompts = is_on
    batch = assemble(samples_of([[(4, 0)]] * 4, [0.0] * 4), config)
    assert (PREFIXES in batch.columns) is is_on
