"""What a training rank holds: weights, gradients, moments, gathered blocks, activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from verl.config import Config, FsdpConfig
from verl.core_algos.advantages import ADVANTAGES
from verl.model_shape import ModelShape
from verl.preflight.memory.needs import ALWAYS, FLOAT, Memory, Need, Phase, pinned
from verl.preflight.memory.trial import Pass, activation_bytes
from verl.training.budgets import actor_budgets, critic_budgets

MOMENTS = 2
"""AdamW's tensors for each learned value, float32."""


@dataclass(frozen=True)
class HeldModel:
    """One set of sharded weights on the ranks."""

    name: str
    shape: ModelShape
    has_head: bool
    frozen: int
    """Bytes of what is not trained, over all ranks."""
    learned: int
    """Values that are trained, over all ranks."""
    offload: FsdpConfig
    forward: frozenset[Phase]
    """Phases in which it computes, the backward's included."""
    update: Phase | None = None
    """In which gradients are made."""
    step: Phase | None = None
    """In which the optimizer uses them."""
    memory: Memory = Memory.DEVICE
    """Whose devices it is on: the actor's, or the critic's own."""

    @property
    def updates(self) -> frozenset[Phase]:
        """In which gradients exist."""
        return frozenset(filter(None, (self.update, self.step)))


def has_critic(config: Config) -> bool:
    """Whether the ranks hold a critic too."""
    return ADVANTAGES[config.algorithm.adv_estimator].needs_critic


def critic_memory(config: Config) -> Memory:
    """What a critic's tensors are held in."""
    return Memory.CRITIC if config.has_own_critic else Memory.DEVICE


def held_models(
    config: Config, policy: ModelShape, critic: ModelShape, item: int
) -> list[HeldModel]:
    """The weights that a rank has a shard of; `item` is the compute dtype's bytes.

    As `verl.training.worker` builds them: below an adapter the base is in the compute dtype,
    the reference is that base, and a critic with an adapter shares it; all else is float32.
    """
    section, own = config.actor_rollout_ref, config.critic.model
    model, forward = section.model, {Phase.LOG_PROBS, Phase.UPDATE_ACTOR}
    critics = frozenset({Phase.VALUES, Phase.UPDATE_CRITIC})
    head = critic.adapter(own.lora_rank, own.target_modules) + critic.hidden
    frozen, learned = 0, policy.parameters()
    if model.has_adapter:
        forward |= {Phase.REF_LOG_PROBS, *critics}
        frozen = item * policy.parameters()
        learned = policy.adapter(model.lora_rank, model.target_modules)
        learned += head if has_critic(config) and config.shares_base else 0
    found = [
        HeldModel("actor", policy, True, frozen, learned, section.actor.fsdp_config,
                  frozenset(forward), Phase.UPDATE_ACTOR, Phase.STEP_ACTOR)
    ]  # fmt: skip
    if config.needs_reference and not model.has_adapter:
        found.append(
            HeldModel("reference", policy, True, FLOAT * policy.parameters(), 0,
                      section.ref.fsdp_config, frozenset({Phase.REF_LOG_PROBS}))
        )  # fmt: skip
    if has_critic(config) and not config.shares_base:
        adapted = own.has_adapter
        frozen = item * critic.parameters() if adapted else 0
        learned = head if adapted else critic.parameters(with_head=False) + critic.hidden
        found.append(
            HeldModel("critic", critic, adapted, frozen, learned, own.fsdp_config, critics,
                      Phase.UPDATE_CRITIC, Phase.STEP_CRITIC, critic_memory(config))
        )  # fmt: skip
    return found


def shard_needs(model: HeldModel, num_ranks: int, local: int) -> Iterator[Need]:
    """A rank's shard of weights, gradients and moments; `local` ranks share a host.

    FSDP2 keeps what is trained in float32, gradients too; a gradient exists from the first
    micro-batch to the end of the optimizer's step. With `param_offload` all of it is on the host,
    with `optimizer_offload` the moments between steps; what is copied from there is pinned.
    """
    learned = model.learned // num_ranks
    weights, gradients = FLOAT * learned + model.frozen // num_ranks, FLOAT * learned
    moments = MOMENTS * FLOAT * learned
    numels = model.shape.tensors(model.has_head)
    on_host = local * pinned(numels, FLOAT, num_ranks) * num_ranks / (FLOAT * sum(numels))
    if model.offload.param_offload:
        held = {"weights": weights * on_host}
        if learned:
            held |= {"gradients": gradients * on_host, "moments": moments * local}
        for what, size in held.items():
            yield Need(Memory.HOST, f"{model.name}: {what}", int(size))
        return
    yield Need(model.memory, f"{model.name}: weights", weights)
    if learned and model.step is not None:
        between = model.offload.optimizer_offload
        phases = frozenset({model.step}) if between else ALWAYS
        yield Need(model.memory, f"{model.name}: gradients", gradients, model.updates)
        yield Need(model.memory, f"{model.name}: moments", moments, phases)
        if between:
            yield Need(Memory.HOST, f"{model.name}: moments", int(moments * on_host))


def gathered_needs(model: HeldModel, num_ranks: int, item: int) -> Iterator[Need]:
    """What FSDP2 gathers in the compute dtype, and gradients before they are spread.

    Embedding, head and last norm are one group that stays from forward to backward; of the blocks
    up to three exist at once (the one that computes, the next one's communication buffer, the last
    one's that is being freed). One rank alone keeps every block to the end of the backward. A
    block's gradient exists in the compute dtype and, while it is reduced, twice in float32. Without
    `reshard_each` all blocks stay, and float32 gradients whole, from micro-batch to micro-batch.
    """
    root, block, layers = model.shape.root(model.has_head), model.shape.block, model.shape.layers
    stays = num_ranks == 1 or not model.offload.reshard_each
    blocks = layers if stays else min(3, layers)
    size = item * (root + blocks * block)
    yield Need(model.memory, f"{model.name}: gathered", size, model.forward)
    if model.update is not None and not model.frozen:
        size, phases = (item + 2 * FLOAT) * block, frozenset({model.update})
        if num_ranks > 1 and not model.offload.reshard_each:
            size += FLOAT * model.learned
        yield Need(model.memory, f"{model.name}: gradients not yet spread", size, phases)


def activation_needs(
    config: Config, policy: ModelShape, critic: ModelShape, dtype: str
) -> Iterator[Need]:
    """Activations and logits of each pass, by its token budget."""
    section, own = config.actor_rollout_ref, config.critic
    minis, longest = section.actor.ppo_mini_batch_size, config.data.max_model_len

    def tokens(budget: int, trajectories: int, crews: int = config.num_crews) -> int:
        """Of the largest micro-batch: the budget, or all there is, or one whole trajectory."""
        return max(longest, min(budget, -(-trajectories // crews) * longest))

    budgets, every = actor_budgets(config), config.num_trajectories
    forward = Pass(
        policy, tokens(budgets.inference, every), longest, dtype,
        lora_rank=section.model.lora_rank, temperature=section.rollout.temperature,
        crew_size=section.actor.ulysses_sequence_parallel_size,
    )  # fmt: skip
    recompute = section.model.enable_gradient_checkpointing or False
    update = replace(
        forward, tokens=tokens(budgets.update, minis), learns=True, recompute=recompute
    )
    looks = {Phase.LOG_PROBS, *([Phase.REF_LOG_PROBS] if config.needs_reference else [])}
    yield _activations(Memory.DEVICE, forward, *looks)
    yield _activations(Memory.DEVICE, update, Phase.UPDATE_ACTOR)
    if not has_critic(config):
        return
    budgets, minis = critic_budgets(config), own.ppo_mini_batch_size or minis
    crews, memory = config.num_critic_crews, critic_memory(config)
    forward = Pass(
        critic, tokens(budgets.inference, every, crews), longest, dtype,
        is_critic=True, lora_rank=own.model.lora_rank, crew_size=config.critic_crew_size,
    )  # fmt: skip
    recompute = own.model.enable_gradient_checkpointing or False
    update = replace(
        forward, tokens=tokens(budgets.update, minis, crews), learns=True, recompute=recompute
    )
    yield _activations(memory, forward, Phase.VALUES)
    yield _activations(memory, update, Phase.UPDATE_CRITIC)


def _activations(memory: Memory, work: Pass, *phases: Phase) -> Need:
    what = "activations" if work.is_critic else "activations and logits"
    return Need(memory, what, activation_bytes(work), frozenset(phases))
