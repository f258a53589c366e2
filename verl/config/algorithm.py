"""From scores to advantages, and where the original does that otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from verl.config.option import option


@dataclass
class KlControlConfig:
    """KL in the reward."""

    type: str = option("fixed", resume="logged", choices=("fixed", "adaptive"))
    """fixed or adaptive."""
    kl_coef: float = option(0.001, resume="logged", ge=0, le=1000)
    """Weight (the starting one, if adaptive); used when KL is not in the loss."""
    target_kl: float = option(0.1, resume="logged", gt=0)
    """Adaptive: the KL in nats, a mean over policy tokens and then sequences, that is aimed at."""
    horizon: int = option(10000, resume="logged", ge=1)
    """Adaptive: how many trajectories the correction takes."""


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling: train on groups whose members do not all score the same."""

    enable: bool = option(False, resume="logged")
    """Replace groups of equal scores by those of further prompts."""
    max_num_gen_batches: int = option(10, resume="logged", ge=1)
    """Batches of prompts that a step may sample before it takes what it has."""


@dataclass
class OverlongBufferConfig:
    """Overlong shaping: scores fall as a trajectory's policy tokens near their limit (DAPO)."""

    enable: bool = option(False, resume="logged")
    """Take the penalty off the score before advantages."""
    max_length: int | None = option(None, resume="logged", ge=1)
    """Policy tokens of a whole trajectory at which the penalty is full; null for all that the
    budgets allow: (max_turns + 1) max_response_length, at most data.max_model_len."""
    length: int | None = option(None, resume="logged", ge=1)
    """Policy tokens below max_length over which it rises from 0; null for a fifth of max_length."""
    penalty_factor: float = option(1.0, resume="logged", ge=0)
    """The full penalty, in units of the score."""


@dataclass
class AlgorithmConfig:
    """From scores to advantages."""

    adv_estimator: str = option(
        "gae", resume="experiment", choices="verl.core_algos.advantages:ADVANTAGES"
    )
    """gae (PPO), grpo, dr_grpo, rloo, opo, grpo_passk, reinforce, reinforce_baseline,
    reinforce_plus_plus, reinforce_plus_plus_baseline or remax (one more, greedy, rollout a
    prompt)."""
    gamma: float = option(1.0, resume="logged", ge=0, le=1)
    """Discount per policy token."""
    lam: float = option(1.0, resume="logged", ge=0, le=1)
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = option(True, resume="logged")
    """Divide the advantages of grpo and grpo_passk by the group's standard deviation."""
    adv_clip: float | None = option(None, resume="logged", gt=0)
    """Bound on the size of an advantage, after whitening or division; null for none."""
    kl_penalty: str = option("kl", resume="logged", choices="verl.core_algos.kl:KL_KINDS")
    """Estimator of KL in the reward: kl, abs, mse, low_var_kl."""
    kl_ctrl: KlControlConfig = field(default_factory=KlControlConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    no_think_rl: bool = option(False, resume="logged")
    """Train without a thinking part: `<think>` is closed at once in the prompt."""


@dataclass
class CompatConfig:
    """Behaviour of the original that was changed here; all false leaves this project's own.

    `compat=search_r1` switches all on, for comparison (docs/algorithms.md); a switch after it wins.
    """

    gae_over_all_tokens: bool = option(False, resume="experiment")
    """GAE steps over observation tokens too, and the critic is trained on them."""
    whiten_over_all_tokens: bool = option(False, resume="experiment")
    """Mean and variance of GAE's advantages are over observation tokens too."""
    sampled_validation: bool = option(False, resume="experiment")
    """Validation samples as training does (rollout.temperature, rollout.top_p)."""


COMPAT_PRESETS: Mapping[str, frozenset[str]] = {
    "none": frozenset(), "search_r1": frozenset(field.name for field in fields(CompatConfig)),
}  # fmt: skip
"""What `compat=NAME` switches on; it switches the others off."""
