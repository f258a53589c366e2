"""Sums all needs of a run by phase: the peak is the largest phase, not the sum over all phases."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from verl.config import Config, FsdpConfig
from verl.ext.memory.needs import (
    ALWAYS,
    CONCURRENT_PHASES,
    CONTEXT,
    CPU_HEAP,
    FLOAT,
    GAPS,
    LOADED,
    PROCESSES,
    EngineMemory,
    Memory,
    Need,
    Phase,
    activation_needs,
    cpu_engine_needs,
    engine_memory,
    gathered_needs,
    gpu_engine_needs,
    held_models,
    other_engine_needs,
    shard_needs,
)
from verl.ext.model_shape import ModelShape
from verl.machine import Machine
from verl.rollout.interface import chosen
from verl.training.devices import DTYPES
from verl.training.weights import SHARD_BYTES
from verl.weights.files import selected_transport

BATCH_BYTES = 160
"""Host bytes per token of a step's trajectories: ids as Python numbers (twice 40), and eight token
columns of the batch, in the driver and in Ray's object store."""


@dataclass(frozen=True)
class Setting:
    """The models and the machine that an estimate is for."""

    policy: ModelShape
    critic: ModelShape
    """Shape of the critic's model, which may be another one."""
    on_gpu: bool
    machine: Machine
    compute_dtype: str = "bfloat16"
    """The dtype to which `trainer.compute_dtype` resolves on this machine."""
    has_gaps: bool = False
    """Whether ranks allocate in torch's usual segments, which leave gaps between tensors."""


@dataclass(frozen=True)
class Shortage:
    """A memory that has less than is needed."""

    memory: Memory
    cause: str
    """What needs the memory: a phase, or the KV cache."""
    needed: int
    free: int


REFUSE_ABOVE = 1.03
"""Share of the free memory above which a run is refused."""
REFUSE_HOST_ABOVE = 1.15
"""The same for host memory, whose estimate is less precise."""
WARN_ABOVE = 0.9
"""Share above which a warning is logged; it includes the guessed constants for processes."""


@dataclass(frozen=True)
class Estimate:
    """The needs of a run: of one device of each kind, and of one node."""

    needs: tuple[Need, ...]
    engine: EngineMemory | None
    """Memory of a vLLM engine that the run starts on GPUs; None if there is none."""

    def needs_in(self, memory: Memory, phase: Phase) -> list[Need]:
        """Return the needs of `memory` in `phase`, largest first; /dev/shm is host memory too."""
        kinds = {memory, Memory.SHARED} if memory is Memory.HOST else {memory}
        needs = [n for n in self.needs if n.memory in kinds and phase in n.phases and n.bytes]
        return sorted(needs, key=lambda need: -need.bytes)

    def total(self, memory: Memory, phase: Phase, with_guesses: bool = True) -> int:
        """Return the bytes of `memory` that are needed in `phase`."""
        return sum(n.bytes for n in self.needs_in(memory, phase) if with_guesses or not n.is_guess)

    def peak_phase(self, memory: Memory) -> Phase:
        """Return the phase with the largest need of `memory`."""
        return max(Phase, key=lambda phase: self.total(memory, phase))

    def peak_bytes(self, memory: Memory, with_guesses: bool = True) -> int:
        """Return the bytes of `memory` that are needed in its peak phase."""
        return self.total(memory, self.peak_phase(memory), with_guesses)

    def shortages(self, config: Config, machine: Machine, limit: float) -> list[Shortage]:
        """Return the memories whose needs exceed the share `limit` of what is free."""
        # On its own card, vLLM allocates exactly its share or does not start: no margin is needed.
        limits = {**dict.fromkeys(Memory, limit), Memory.ENGINE: 1.0}
        if limit > 1:
            limits[Memory.HOST] = max(limit, REFUSE_HOST_ABOVE)
        short = [
            Shortage(memory, self.peak_phase(memory).value, self.peak_bytes(memory), free)
            for memory, free in free_memory(machine).items()
            if self.peak_bytes(memory, with_guesses=limit < 1) > limits[memory] * free
        ]
        engine, longest = self.engine, config.data.max_model_len
        if engine is not None and engine.cached_tokens < longest:
            needed = engine.share - engine.cache + longest * engine.per_token
            cause = f"an engine with KV cache for one trajectory of {longest} tokens"
            short.append(Shortage(engine.memory, cause, needed, engine.share))
        return short


def free_memory(machine: Machine) -> dict[Memory, int]:
    """Return the free bytes of each kind of memory that this machine has."""
    free = {Memory.HOST: machine.host.free}
    if machine.shared_free is not None:
        free[Memory.SHARED] = machine.shared_free
    if machine.devices:
        smallest = min(device.free for device in machine.devices)
        free |= dict.fromkeys((Memory.DEVICE, Memory.ENGINE, Memory.CRITIC), smallest)
    return free


def estimate(config: Config, setting: Setting) -> Estimate:
    """Estimate everything that a run holds, on one device of each kind and on one node."""
    policy, dtype = setting.policy, config.actor_rollout_ref.rollout.dtype
    item = DTYPES[setting.compute_dtype if dtype == "auto" else dtype].itemsize
    needs = [*node_needs(config, policy, item, setting.on_gpu), *rank_needs(config, setting)]
    if config.actor_rollout_ref.rollout.weights_dir is not None:
        needs = [need for need in needs if need.memory is not Memory.SHARED]
    has_engines = config.samples_rollouts and not config.placement.servers
    has_vllm = has_engines and config.actor_rollout_ref.rollout.name == "vllm"
    if has_engines and not has_vllm:
        needs += other_engine_needs(config, policy, item, setting.on_gpu)
    if not setting.on_gpu:
        if has_vllm:
            needs += cpu_engine_needs(config, policy, item)
        return Estimate(tuple(_on_host(need, config) for need in needs), None)
    needs.append(Need(Memory.DEVICE, "rank's context", CONTEXT))
    if config.placement.is_apart("critic"):
        needs.append(Need(Memory.CRITIC, "critic rank's context", CONTEXT))
    if not has_vllm:
        return Estimate(tuple(needs), None)
    device_bytes = min((device.total for device in setting.machine.devices), default=0)
    engine = engine_memory(config, policy, item, device_bytes)
    needs += gpu_engine_needs(config, policy, item, engine.share)
    return Estimate(tuple(needs), engine)


def rank_needs(config: Config, setting: Setting) -> list[Need]:
    """Return what a rank holds on its device and, if offloaded, a node's ranks hold on the host."""
    policy, critic, dtype = setting.policy, setting.critic, setting.compute_dtype
    item = DTYPES[dtype].itemsize
    needs: list[Need] = []
    for model in held_models(config, policy, critic, item):
        if not setting.on_gpu:  # on CPU, offloading has no effect
            model = replace(model, fsdp=FsdpConfig(reshard_each=model.fsdp.reshard_each))
        is_critic = model.memory is Memory.CRITIC
        plan = config.placement.critic if is_critic else config.placement.actor
        needs += shard_needs(model, plan.num_ranks, plan.per_node)
        needs += gathered_needs(model, plan.num_ranks, item)
    passes = list(activation_needs(config, policy, critic, dtype))
    if setting.on_gpu and setting.has_gaps:
        needs += [
            replace(need, name="gaps between tensors", bytes=int(GAPS * need.bytes))
            for need in passes
        ]
    return [*needs, *passes]


def node_needs(config: Config, policy: ModelShape, item: int, on_gpu: bool) -> Iterator[Need]:
    """Yield a node's needs for bare processes, a step's trajectories and weight transfers.

    Weights are kept in a folder in shared memory: whole tensors are gathered one at a time and
    collected up to SHARD_BYTES by the ranks of a node together. The estimate includes these bytes
    and, with `max_staleness`, a whole older version that engines still read. A transport without
    files has buffers on a rank's device instead. If the engine loads an adapter, only the adapter
    is transferred.
    """
    rank, engine, driver = PROCESSES["gpu" if on_gpu else "cpu"]
    if config.placement.servers or config.actor_rollout_ref.rollout.name != "vllm":
        engine = PROCESSES["cpu"][0]  # a replica without vLLM's engine processes
    local = sum(group.per_node for group in config.placement.groups.values())
    engines = config.placement.num_engines(on_gpu) if config.samples_rollouts else 0
    replicas = -(-engines // config.placement.actor.num_nodes)
    for name, size in (
        ("processes of the ranks", local * rank),
        ("processes of the engines", replicas * engine),
        ("driver and Ray", driver),
    ):
        yield Need(Memory.HOST, name, size, is_guess=True)
    tokens = config.num_trajectories * config.data.max_model_len
    yield Need(Memory.HOST, "trajectories of a step", BATCH_BYTES * tokens, LOADED)
    if not config.samples_rollouts:
        return
    model, sync = config.actor_rollout_ref.model, frozenset({Phase.SYNC})
    if not chosen(config).is_whole:
        size = 2 * FLOAT * policy.adapter(model.lora_rank, model.target_modules)
        yield Need(Memory.SHARED, "weights for the engines", size, LOADED)
        return
    size, largest = item * policy.parameters(), max(policy.tensors())
    yield Need(Memory.DEVICE, "largest tensor, whole", (FLOAT + item) * largest, sync)
    if buffers := selected_transport(config).device_bytes(item * largest):
        yield Need(Memory.DEVICE, "weights in transfer, in two buffers", buffers, sync)
        return
    yield Need(Memory.SHARED, "weights for the engines", size, LOADED)
    if config.actor_rollout_ref.rollout.num_weight_versions > 1:
        yield Need(Memory.SHARED, "previous version of the weights", size, LOADED)
    else:
        yield Need(Memory.SHARED, "next weight file", min(size, SHARD_BYTES), sync)
    yield Need(Memory.HOST, "weights being written", min(size, SHARD_BYTES), sync)


def _on_host(need: Need, config: Config) -> Need:
    """Return a need of a device as a need of the host, which a node's ranks share, for runs on CPU.

    Separate critic ranks compute at the same time, so their needs count in the actor's phases too.
    """
    if need.memory not in (Memory.DEVICE, Memory.CRITIC):
        return need
    factor, phases = 1.0 if need.phases == ALWAYS else CPU_HEAP, need.phases
    local = config.placement.actor.per_node
    if need.memory is Memory.CRITIC:
        local = config.placement.critic.per_node
        phases = phases.union(*(CONCURRENT_PHASES.get(phase, ()) for phase in phases))
    return replace(need, memory=Memory.HOST, bytes=int(factor * local * need.bytes), phases=phases)
