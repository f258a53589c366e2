"""What a training rank holds: weights, gradients, moments, gathered blocks, activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.config import Config, FsdpConfig
from verl.core_algos.advantages import ADVANTAGES
from verl.preflight.memory.activations import (
    kept_for_backward,
    logits,
    passing_while_learning,
    passing_without_gradient,
)
from verl.preflight.memory.needs import ALWAYS, FLOAT, Need, Phase, Place, pinned
from verl.preflight.memory.shape import ModelShape
from verl.training.worker import actor_budgets, critic_budgets

FORWARD, KEPT, PASSING = "activations", "activations kept", "activations and logits at once"
MOMENTS = 2
"""AdamW's tensors a learned value, float32."""


@dataclass(frozen=True)
class HeldModel:
    """One set of sharded weights on the ranks."""

    name: str
    shape: ModelShape
    has_head: bool
    frozen_item: int
    """Bytes of a value that is not trained; 0 when all are."""
    learned: int
    """Values that are trained, over all ranks."""
    offload: FsdpConfig

    @property
    def frozen(self) -> int:
        """Bytes of what is not trained, over all ranks."""
        return self.frozen_item * self.shape.parameters(self.has_head)


def has_critic(config: Config) -> bool:
    """Whether the ranks hold a critic too."""
    return ADVANTAGES[config.algorithm.adv_estimator].needs_critic


def held_models(
    config: Config, policy: ModelShape, critic: ModelShape, item: int
) -> list[HeldModel]:
    """The weights that a rank has a shard of; `item` is the compute dtype's bytes.

    As `verl.training.worker` builds them: below an adapter the base is in the compute dtype,
    the reference is that base, and a critic with an adapter shares it; all else is float32.
    """
    section = config.actor_rollout_ref
    model, own = section.model, config.critic.model
    head = critic.adapter(own.lora_rank, own.target_modules) + critic.hidden
    learned = policy.parameters()
    if model.has_adapter:
        learned = policy.adapter(model.lora_rank, model.target_modules)
        learned += head if has_critic(config) and config.shares_base else 0
    frozen = item if model.has_adapter else 0
    models = [HeldModel("actor", policy, True, frozen, learned, section.actor.fsdp_config)]
    if config.needs_reference and not model.has_adapter:
        models.append(HeldModel("reference", policy, True, FLOAT, 0, section.ref.fsdp_config))
    if has_critic(config) and not config.shares_base:
        all_of_it = critic.parameters(with_head=False) + critic.hidden
        learned, frozen = (head, item) if own.has_adapter else (all_of_it, 0)
        with_head = own.has_adapter
        models.append(HeldModel("critic", critic, with_head, frozen, learned, own.fsdp_config))
    return models


def shard_needs(model: HeldModel, num_ranks: int, local: int) -> Iterator[Need]:
    """A rank's shard of weights, gradients and moments; `local` ranks share a host.

    FSDP2 keeps what is trained in float32, gradients too; a gradient exists from the first
    micro-batch to the end of the optimizer's step. With `param_offload` all of it is on the host
    (weights and gradients pinned), with `optimizer_offload` the moments (pinned) between steps.
    """
    learned, frozen = model.learned // num_ranks, model.frozen // num_ranks
    weights, moments = FLOAT * learned + frozen, MOMENTS * FLOAT * learned
    gradient = FLOAT * learned
    numels = model.shape.tensors(model.has_head)
    rounded = pinned(numels, FLOAT, num_ranks) / (FLOAT * model.shape.parameters(model.has_head))
    rounding = rounded * num_ranks
    update, step = _update_phases(model)
    if model.offload.param_offload:
        yield Need(Place.HOST, f"{model.name}: weights", int(local * weights * rounding))
        if learned:
            yield Need(Place.HOST, f"{model.name}: gradients", int(local * gradient * rounding))
            yield Need(Place.HOST, f"{model.name}: moments", local * moments)
        return
    yield Need(Place.DEVICE, f"{model.name}: weights", weights)
    if not learned:
        return
    yield Need(Place.DEVICE, f"{model.name}: gradients", gradient, update | step)
    on_device = step if model.offload.optimizer_offload else ALWAYS
    yield Need(Place.DEVICE, f"{model.name}: moments", moments, on_device)
    if model.offload.optimizer_offload:
        yield Need(Place.HOST, f"{model.name}: moments", int(local * moments * rounding))


def _update_phases(model: HeldModel) -> tuple[frozenset[Phase], frozenset[Phase]]:
    if model.name == "critic":
        return frozenset({Phase.UPDATE_CRITIC}), frozenset({Phase.STEP_CRITIC})
    return frozenset({Phase.UPDATE_ACTOR}), frozenset({Phase.STEP_ACTOR})


def gathered_needs(model: HeldModel, num_ranks: int, item: int) -> Iterator[Need]:
    """What FSDP2 gathers in the compute dtype, and gradients before they are spread.

    Embedding, head and last norm are one group that stays from forward to backward; of the blocks
    up to three exist at once (the one that computes, the next one's communication buffer, the last
    one's that is being freed). One rank alone keeps every block to the end of the backward. A
    block's gradient exists in the compute dtype and, while it is reduced, twice in float32.
    """
    root, block = model.shape.root(model.has_head), model.shape.block
    blocks = model.shape.layers if num_ranks == 1 else min(3, model.shape.layers)
    phases = _forward_phases(model)
    yield Need(Place.DEVICE, f"{model.name}: gathered", item * (root + blocks * block), phases)
    if model.learned and not model.frozen_item:
        update, _ = _update_phases(model)
        reduced = (item + 2 * FLOAT) * block + item * root
        yield Need(Place.DEVICE, f"{model.name}: gradients not yet spread", reduced, update)


def _forward_phases(model: HeldModel) -> frozenset[Phase]:
    match model.name:
        case "reference":
            return frozenset({Phase.REF_LOG_PROBS})
        case "critic":
            return frozenset({Phase.VALUES, Phase.UPDATE_CRITIC})
        case _:
            own = frozenset({Phase.LOG_PROBS, Phase.UPDATE_ACTOR})
            shared = frozenset({Phase.REF_LOG_PROBS, Phase.VALUES, Phase.UPDATE_CRITIC})
            return own | shared if model.frozen_item else own


def working_needs(
    config: Config, policy: ModelShape, critic: ModelShape, item: int
) -> Iterator[Need]:
    """Activations and logits of each pass, by its token budget."""
    section, budgets = config.actor_rollout_ref, actor_budgets(config)
    heated, minis = section.rollout.temperature != 1.0, section.actor.ppo_mini_batch_size
    look = _tokens(config, budgets.inference, config.num_trajectories)
    head = logits(policy, look, item, heated)
    looks = {Phase.LOG_PROBS, *([Phase.REF_LOG_PROBS] if config.needs_reference else [])}
    yield _need(FORWARD, passing_without_gradient(policy, look, item, head), *looks)
    tokens = _tokens(config, budgets.update, minis)
    recompute = section.model.enable_gradient_checkpointing
    head = logits(policy, tokens, item, heated)
    yield _need(KEPT, kept_for_backward(policy, tokens, item, recompute), Phase.UPDATE_ACTOR)
    passing = passing_while_learning(policy, tokens, item, recompute, head)
    yield _need(PASSING, passing, Phase.UPDATE_ACTOR)
    if has_critic(config):
        yield from _critics_working_needs(config, critic, item)


def _critics_working_needs(config: Config, shape: ModelShape, item: int) -> Iterator[Need]:
    """As the policy's, without logits."""
    own, budgets = config.critic, critic_budgets(config)
    minis = own.ppo_mini_batch_size or config.actor_rollout_ref.actor.ppo_mini_batch_size
    look = _tokens(config, budgets.inference, config.num_trajectories)
    yield _need(FORWARD, passing_without_gradient(shape, look, item, 0), Phase.VALUES)
    tokens = _tokens(config, budgets.update, minis)
    recompute = own.model.enable_gradient_checkpointing
    yield _need(KEPT, kept_for_backward(shape, tokens, item, recompute), Phase.UPDATE_CRITIC)
    passing = passing_while_learning(shape, tokens, item, recompute, 0)
    yield _need(PASSING, passing, Phase.UPDATE_CRITIC)


def _need(what: str, size: int, *phases: Phase) -> Need:
    return Need(Place.DEVICE, what, size, frozenset(phases))


def _tokens(config: Config, budget: int, trajectories: int) -> int:
    """Tokens of the largest micro-batch: the budget, or all there is, or one whole trajectory."""
    longest = config.data.max_model_len
    share = -(-trajectories // config.num_ranks) * longest
    return max(longest, min(budget, share))
