"""Options that turn scores into advantages."""

from dataclasses import dataclass, field

from verl.config.option import option


@dataclass
class KlControlConfig:
    """KL penalty in the reward."""

    type: str = option("fixed", resume="logged", choices=("fixed", "adaptive"))
    """Controller of the KL coefficient: fixed or adaptive."""
    kl_coef: float = option(0.001, resume="logged", ge=0, le=1000)
    """KL coefficient (its initial value if adaptive); used when KL is not in the loss."""
    target_kl: float = option(0.1, resume="logged", gt=0)
    """Adaptive: target KL in nats, averaged over policy tokens and then over sequences."""


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling: train only on groups whose scores differ."""

    enable: bool = option(False, resume="logged")
    """Replace groups of equal scores by groups sampled for further prompts."""
    max_num_gen_batches: int = option(10, resume="logged", ge=1)
    """Maximum prompts of one step, in batches; the step then trains on the groups it has."""


@dataclass
class OverlongBufferConfig:
    """Overlong shaping: a penalty that grows as a trajectory nears its length limit (DAPO)."""

    enable: bool = option(False, resume="logged")
    """Subtract the penalty from the score before advantages are computed."""
    penalty_factor: float = option(1.0, resume="logged", ge=0)
    """The full penalty, in units of the score."""


@dataclass
class AlgorithmConfig:
    """From scores to advantages."""

    adv_estimator: str = option(
        "gae", resume="experiment", choices="verl.core_algos.advantages:ADVANTAGES", or_file=True
    )
    """Advantage estimator: gae (PPO), grpo, dr_grpo, rloo, opo, grpo_passk, reinforce,
    reinforce_baseline, reinforce_plus_plus, reinforce_plus_plus_baseline, or path/file.py:Name
    (docs/explanation/algorithms.md)."""
    gamma: float = option(1.0, resume="logged", ge=0, le=1)
    """Discount factor per policy token."""
    lam: float = option(1.0, resume="logged", ge=0, le=1)
    """GAE lambda."""
    norm_adv_by_std_in_grpo: bool = option(True, resume="logged")
    """Divide the advantages of grpo and grpo_passk by the standard deviation of the group."""
    kl_penalty: str = option("kl", resume="logged", choices="verl.core_algos.kl:KL_KINDS")
    """KL estimator in the reward: kl, abs, mse, low_var_kl."""
    kl_ctrl: KlControlConfig = field(default_factory=KlControlConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    outcome_gate: bool = option(True, resume="logged")
    """With an estimator that compares groups: a group in which no outcome is right gives no
    advantage, whatever shapes its scores (docs/guides/rewards.md)."""
    no_think_rl: bool = option(False, resume="logged")
    """Train without thinking: the prompt ends with a `<think>` block that is already closed."""
