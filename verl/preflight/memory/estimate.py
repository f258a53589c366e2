"""All needs of a run, added up by phase: the peak is the worst phase, not the sum of everything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from verl.config import Config, FsdpConfig
from verl.machine import Machine
from verl.model_shape import ModelShape
from verl.preflight.memory.needs import (
    ALWAYS,
    CONCURRENT_PHASES,
    CONTEXT,
    CPU_HEAP,
    FLOAT,
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
from verl.rollout.interface import engine_takes_adapter
from verl.training.devices import DTYPES
from verl.training.weight_stream import BUFFER_BYTES, NUM_BUFFERS
from verl.training.weights import SHARD_BYTES

BATCH_BYTES = 160
"""Host bytes a token of a step's trajectories: ids as Python numbers (twice 40), eight token
columns of the batch in the driver, and once more in Ray's object store."""

COMPARED = 1 + 2 * 8 // 2
"""Device bytes of an element that is compared: whether it changed; and its position and its block,
for half of all elements, the most that are sent so."""


@dataclass(frozen=True)
class Setting:
    """What an estimate depends on, apart from the options."""

    policy: ModelShape
    critic: ModelShape
    """Of the critic's model, which may be another one."""
    on_gpu: bool
    machine: Machine
    compute_dtype: str = "bfloat16"
    """What `trainer.compute_dtype` comes to on this machine."""


@dataclass(frozen=True)
class Shortage:
    """A memory that has less than is needed."""

    memory: Memory
    cause: str
    """What needs it: a phase, or the KV cache."""
    needed: int
    free: int


REFUSE_ABOVE = 1.15
"""Share of what is free above which a need is refused: no estimate is that wrong."""
WARN_ABOVE = 0.9
"""Share above which it is warned of; here the constants for processes, which are guesses, count."""


@dataclass(frozen=True)
class Estimate:
    """What a run needs: of one device, and of one node."""

    needs: tuple[Need, ...]
    engine: EngineMemory | None
    """Of one vLLM on GPUs; None on CPU, for servers with devices of their own, for other engines,
    and where nothing samples."""

    def needs_in(self, memory: Memory, phase: Phase) -> list[Need]:
        """What is held there then, the largest first; the host holds its shared memory too."""
        held = {memory, Memory.SHARED} if memory is Memory.HOST else {memory}
        found = [n for n in self.needs if n.memory in held and phase in n.phases and n.bytes]
        return sorted(found, key=lambda need: -need.bytes)

    def total(self, memory: Memory, phase: Phase, with_guesses: bool = True) -> int:
        """Bytes held there then."""
        return sum(n.bytes for n in self.needs_in(memory, phase) if with_guesses or not n.is_guess)

    def peak_phase(self, memory: Memory) -> Phase:
        """The phase in which most is held there."""
        return max(Phase, key=lambda phase: self.total(memory, phase))

    def peak_bytes(self, memory: Memory, with_guesses: bool = True) -> int:
        """Bytes held there at the peak."""
        return self.total(memory, self.peak_phase(memory), with_guesses)

    def shortages(self, config: Config, machine: Machine, limit: float) -> list[Shortage]:
        """What of the machine is too small: needs are above the share `limit` of what is free."""
        # vLLM starts with its whole share of a card of its own, or not at all: nothing is guessed.
        limits = {**dict.fromkeys(Memory, limit), Memory.ENGINE: 1.0}
        short = [
            Shortage(memory, self.peak_phase(memory).value, self.peak_bytes(memory), free)
            for memory, free in free_memory(machine).items()
            if self.peak_bytes(memory, with_guesses=limit < 1) > limits[memory] * free
        ]
        engine, longest = self.engine, config.data.max_model_len
        if engine is not None and engine.cached_tokens < longest:
            needed = engine.share - engine.cache + longest * engine.per_token
            what = f"an engine with KV cache for one trajectory of {longest} tokens"
            short.append(Shortage(engine.memory, what, needed, engine.share))
        return short


def free_memory(machine: Machine) -> dict[Memory, int]:
    """Bytes that a run may take, as far as this machine has such memory."""
    free = {Memory.HOST: machine.host.free}
    if machine.shared_free is not None:
        free[Memory.SHARED] = machine.shared_free
    if machine.devices:
        least = min(device.free for device in machine.devices)
        free |= dict.fromkeys((Memory.DEVICE, Memory.ENGINE, Memory.CRITIC), least)
    return free


def estimate(config: Config, setting: Setting) -> Estimate:
    """Everything that a run of `config` holds, one device and one node of each kind."""
    policy, dtype = setting.policy, config.actor_rollout_ref.rollout.dtype
    item = DTYPES[setting.compute_dtype if dtype == "auto" else dtype].itemsize
    needs = [*node_needs(config, policy, item, setting.on_gpu), *rank_needs(config, setting)]
    if config.actor_rollout_ref.rollout.weights_dir is not None:
        needs = [need for need in needs if need.memory is not Memory.SHARED]
    has_engines = config.samples_rollouts and not config.is_external
    has_vllm = has_engines and config.actor_rollout_ref.rollout.name == "vllm"
    if has_engines and not has_vllm:
        needs += other_engine_needs(config, policy, item, setting.on_gpu)
    if not setting.on_gpu:
        if has_vllm:
            needs += cpu_engine_needs(config, policy, item)
        return Estimate(tuple(_on_host(need, config) for need in needs), None)
    needs.append(Need(Memory.DEVICE, "rank's context", CONTEXT))
    if config.has_own_critic:
        needs.append(Need(Memory.CRITIC, "critic rank's context", CONTEXT))
    if not has_vllm:
        return Estimate(tuple(needs), None)
    device_bytes = min((device.total for device in setting.machine.devices), default=0)
    engine = engine_memory(config, policy, item, device_bytes)
    needs += gpu_engine_needs(config, policy, item, engine.share)
    return Estimate(tuple(needs), engine)


def rank_needs(config: Config, setting: Setting) -> list[Need]:
    """What one rank holds of its device (and, where it offloads, all of a node's of the host)."""
    policy, critic, dtype = setting.policy, setting.critic, setting.compute_dtype
    item = DTYPES[dtype].itemsize
    found: list[Need] = []
    for model in held_models(config, policy, critic, item):
        if not setting.on_gpu:  # offloading has no effect there
            only = FsdpConfig(reshard_each=model.offload.reshard_each)
            model = replace(model, offload=only)
        ranks, local = config.num_ranks, config.trainer.n_gpus_per_node
        if model.memory is Memory.CRITIC:
            ranks, local = config.num_critic_ranks, config.critic_gpus_per_node
        found += shard_needs(model, ranks, local)
        found += gathered_needs(model, ranks, item)
    return [*found, *activation_needs(config, policy, critic, dtype)]


def node_needs(config: Config, policy: ModelShape, item: int, on_gpu: bool) -> Iterator[Need]:
    """Processes before they load anything, a step's trajectories, and weights on their way.

    Weights lie in a folder in shared memory that stays: whole tensors are gathered one at a time
    and collected up to SHARD_BYTES by the ranks of a node together. Room is kept for that, and with
    `max_staleness` for a whole version that engines still read. With `weight_sync=ipc` they pass
    through two buffers of a rank's device instead. Of an adapter, that alone travels.
    """
    rank, engine, driver = PROCESSES["gpu" if on_gpu else "cpu"]
    if config.is_external or config.actor_rollout_ref.rollout.name != "vllm":  # no engine's core
        engine = PROCESSES["cpu"][0]
    local = config.trainer.n_gpus_per_node + config.critic_gpus_per_node
    replicas = (
        -(-config.num_engines(on_gpu) // config.trainer.nnodes) if config.samples_rollouts else 0
    )
    for what, size in (
        ("processes of the ranks", local * rank),
        ("processes of the engines", replicas * engine),
        ("driver and Ray", driver),
    ):
        yield Need(Memory.HOST, what, size, is_guess=True)
    tokens = config.num_trajectories * config.data.max_model_len
    yield Need(Memory.HOST, "trajectories of a step", BATCH_BYTES * tokens, LOADED)
    if not config.samples_rollouts:
        return
    model, sync = config.actor_rollout_ref.model, frozenset({Phase.SYNC})
    if engine_takes_adapter(config):
        size = 2 * FLOAT * policy.adapter(model.lora_rank, model.target_modules)
        yield Need(Memory.SHARED, "weights for the engines", size, LOADED)
        return
    size, largest = item * policy.parameters(), max(policy.tensors())
    yield Need(Memory.DEVICE, "largest tensor, whole", (FLOAT + item) * largest, sync)
    if config.streams_weights:
        buffers = NUM_BUFFERS * max(BUFFER_BYTES, item * largest)
        yield Need(Memory.DEVICE, "weights on their way, in two buffers", buffers, sync)
        if config.actor_rollout_ref.rollout.weight_delta:
            copies = 1 + replicas * config.actor_rollout_ref.rollout.tensor_model_parallel_size
            yield Need(Memory.HOST, "weights that were sent last", copies * size, LOADED)
            compared = (item + COMPARED) * largest
            yield Need(Memory.DEVICE, "largest tensor, compared", compared, sync)
        return
    yield Need(Memory.SHARED, "weights for the engines", size, LOADED)
    if config.num_weight_versions > 1:
        yield Need(Memory.SHARED, "the version before them", size, LOADED)
    else:
        yield Need(Memory.SHARED, "their next file", min(size, SHARD_BYTES), sync)
    yield Need(Memory.HOST, "weights being written", min(size, SHARD_BYTES), sync)


def _on_host(need: Need, config: Config) -> Need:
    """On CPU a rank's device is the host, which all ranks of the node share.

    Ranks of the critic's own hold what they need while the actor's hold theirs.
    """
    if need.memory not in (Memory.DEVICE, Memory.CRITIC):
        return need
    factor, phases = 1.0 if need.phases == ALWAYS else CPU_HEAP, need.phases
    local = config.trainer.n_gpus_per_node
    if need.memory is Memory.CRITIC:
        local = config.critic_gpus_per_node
        phases = phases.union(*(CONCURRENT_PHASES.get(phase, ()) for phase in phases))
    size = int(factor * local * need.bytes)
    return replace(need, memory=Memory.HOST, bytes=size, phases=phases)
