"""Rules between the options of advantages and losses: what could not learn, or would say nothing.

An option that another one leaves without effect is refused too, so that no run is taken for what it
is not.
"""

from __future__ import annotations

from collections.abc import Iterator

from verl.config import Config
from verl.core_algos.advantages import ADVANTAGES

Problem = tuple[str, object, str, str]
"""Subject, got, expected, fix."""
ACTOR = "actor_rollout_ref.actor"


def algorithm_problems(config: Config) -> Iterator[Problem]:
    """All that is wrong between `algorithm`, the actor's losses and `compat`."""
    for rule in (_estimator, _policy_loss, _llds, _mismatch, _kl_control, _shaping, _compat):
        yield from rule(config)


def _estimator(config: Config) -> Iterator[Problem]:
    """What an advantage estimator compares, and whether there is a critic."""
    key, n_agent = "actor_rollout_ref.rollout.n_agent", config.actor_rollout_ref.rollout.n_agent
    name = config.algorithm.adv_estimator
    estimator = ADVANTAGES.get(name)
    alone = estimator is not None and estimator.needs_groups and n_agent == 1
    if alone and not config.trainer.val_only:
        expected = f"2 or more: {name} compares the samples of a prompt, one alone has advantage 0"
        yield key, n_agent, expected, f"{key}=5"
    if config.algorithm.filter_groups.enable and n_agent == 1:
        expected = "2 or more: algorithm.filter_groups compares the samples of a prompt"
        yield key, n_agent, expected, f"{key}=5"
    warmup = config.trainer.critic_warmup
    if estimator is not None and not estimator.needs_critic and warmup > 0:
        key = "trainer.critic_warmup"
        yield key, warmup, f"0: {name} has no critic that could warm up", f"{key}=0"


def _policy_loss(config: Config) -> Iterator[Problem]:
    """Bounds of the losses' clips."""
    actor = config.actor_rollout_ref.actor
    ranges = {
        f"{ACTOR}.clip_ratio": (actor.clip_ratio, "0.2"),
        f"{ACTOR}.clip_ratio_high": (actor.clip_ratio_high, "null"),
        f"{ACTOR}.grad_clip": (actor.grad_clip, "1.0"),
        "critic.grad_clip": (config.critic.grad_clip, "1.0"),
        "critic.cliprange_value": (config.critic.cliprange_value, "0.5"),
    }
    for key, (got, usual) in ranges.items():
        if got is not None and got <= 0:
            yield key, got, "more than 0", f"{key}={usual}"
    if actor.clip_ratio_c <= 1:
        key = f"{ACTOR}.clip_ratio_c"
        yield key, actor.clip_ratio_c, "more than 1", f"{key}=3.0"


def _llds(config: Config) -> Iterator[Problem]:
    """LLDS needs likelihood that can have fallen."""
    key, coef = f"{ACTOR}.llds_coef", config.actor_rollout_ref.actor.llds_coef
    if coef < 0:
        yield key, coef, "0 or more", f"{key}=0.1"
    if coef > 0 and config.updates_per_step == 1:
        expected = "0, or several updates a step: with one, no likelihood has fallen since sampling"
        yield key, coef, expected, "a smaller ppo_mini_batch_size beside it"


def _mismatch(config: Config) -> Iterator[Problem]:
    """Importance weights of trainer against engine."""
    actor = config.actor_rollout_ref.actor
    if actor.rollout_is_threshold <= 0:
        key = f"{ACTOR}.rollout_is_threshold"
        yield key, actor.rollout_is_threshold, "more than 0", f"{key}=2.0"
    bound, key = actor.rollout_mask_threshold, f"{ACTOR}.rollout_mask_threshold"
    if bound is None:
        return
    if bound <= 1:
        yield key, bound, "more than 1, or null", f"{key}=4"
    if actor.rollout_is == "none":
        expected = "null: with rollout_is=none there is no ratio to bound"
        yield key, bound, expected, f"{ACTOR}.rollout_is=token (or sequence) beside it"


def _kl_control(config: Config) -> Iterator[Problem]:
    """An adaptive controller of KL in the reward."""
    control, key = config.algorithm.kl_ctrl, "algorithm.kl_ctrl"
    if control.type != "adaptive":
        return
    for name in ("target_kl", "horizon"):
        if getattr(control, name) <= 0:
            yield f"{key}.{name}", getattr(control, name), "more than 0", f"leave {key}.{name} out"
    if not config.kl_in_reward:
        expected = "fixed: it acts on KL in the reward, of which there is none"
        fix = f"{ACTOR}.use_kl_loss=false and {key}.kl_coef above 0, or {key}.type=fixed"
        yield f"{key}.type", control.type, expected, fix


def _shaping(config: Config) -> Iterator[Problem]:
    """Bounds on lengths and advantages."""
    shaping, prefix = config.algorithm.overlong_buffer, "algorithm.overlong_buffer"
    for name in ("length", "max_length"):
        key, got = f"{prefix}.{name}", getattr(shaping, name)
        if got is not None and got < 1:
            yield key, got, "1 or more policy tokens, or null", f"{key}=null"
    longest = config.overlong_max_length
    if shaping.length is not None and shaping.length > longest:
        key, expected = f"{prefix}.length", f"at most overlong_buffer.max_length={longest}"
        yield key, shaping.length, expected, f"{key}=null"
    if shaping.enable and longest - config.overlong_length >= config.max_policy_tokens:
        key = f"{prefix}.max_length"
        expected = (
            f"a penalty that begins below {config.max_policy_tokens}, all tokens that the budgets "
            "let the policy sample"
        )
        yield key, shaping.max_length, expected, f"{key}=null"
    if shaping.penalty_factor < 0:
        key, got = f"{prefix}.penalty_factor", shaping.penalty_factor
        yield key, got, "0 or more: it is taken off the score", f"{key}=1.0"
    bound = config.algorithm.adv_clip
    if bound is not None and bound <= 0:
        yield "algorithm.adv_clip", bound, "more than 0, or null", "algorithm.adv_clip=5"


def _compat(config: Config) -> Iterator[Problem]:
    """Switches that need each other."""
    compat = config.compat
    if compat.whiten_over_all_tokens and not compat.gae_over_all_tokens:
        key = "compat.whiten_over_all_tokens"
        expected = "false, for GAE gives observation tokens no advantage to whiten"
        yield key, True, expected, "set compat.gae_over_all_tokens=true beside it"
