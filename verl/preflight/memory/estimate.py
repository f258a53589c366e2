"""All needs of a run, added up by phase: the peak is the worst phase, not the sum of everything."""

from __future__ import annotations

from dataclasses import dataclass, replace

from verl.config import Config
from verl.preflight.memory.engine import EngineRoom, cpu_engine_needs, engine_room, gpu_engine_needs
from verl.preflight.memory.needs import ALWAYS, CPU, GPU, Need, Phase, Place
from verl.preflight.memory.node import (
    batch_needs,
    hand_over_needs,
    process_needs,
    saving_needs,
)
from verl.preflight.memory.ranks import (
    HeldModel,
    gathered_needs,
    held_models,
    shard_needs,
    working_needs,
)
from verl.preflight.memory.shape import ModelShape

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Setting:
    """What an estimate depends on besides the options."""

    policy: ModelShape
    critic: ModelShape
    """Of the critic's model, which may be another one."""
    on_gpu: bool
    device_bytes: int = 0
    """All memory of one GPU."""
    compute_dtype: str = "bfloat16"
    """What `trainer.compute_dtype` comes to on this machine."""

    def engine_dtype(self, config: Config) -> str:
        """What the engines compute in."""
        wanted = config.actor_rollout_ref.rollout.dtype
        return self.compute_dtype if wanted == "auto" else wanted


@dataclass(frozen=True)
class Estimate:
    """What a run needs: of one device, and of one node."""

    needs: tuple[Need, ...]
    engine: EngineRoom | None
    """Of one engine on GPUs; None on CPU."""

    def at(self, place: Place, phase: Phase) -> list[Need]:
        """What is held there then; the host holds its shared memory too."""
        places = {place, Place.SHARED} if place is Place.HOST else {place}
        return [n for n in self.needs if n.place in places and phase in n.phases and n.bytes]

    def total(self, place: Place, phase: Phase, with_guesses: bool = True) -> int:
        """Bytes held there then, without what is optional."""
        needs = [need for need in self.at(place, phase) if not need.optional]
        return sum(need.bytes for need in needs if with_guesses or not need.is_guess)

    def peak(self, place: Place) -> Phase:
        """The phase in which most is held there."""
        return max(Phase, key=lambda phase: self.total(place, phase))

    def most(self, place: Place, with_guesses: bool = True) -> int:
        """Bytes held there at the peak."""
        return self.total(place, self.peak(place), with_guesses)


def estimate(config: Config, setting: Setting) -> Estimate:
    """Everything that a run of `config` holds, one device and one node of each kind."""
    item = ITEM_BYTES[setting.compute_dtype]
    engine_item = ITEM_BYTES[setting.engine_dtype(config)]
    policy, critic = setting.policy, setting.critic
    ranks, local = config.num_ranks, config.trainer.n_gpus_per_node
    models = held_models(config, policy, critic, item)
    constants = GPU if setting.on_gpu else CPU
    needs = [
        *process_needs(config, constants, setting.on_gpu),
        *batch_needs(config),
        *hand_over_needs(config, policy, engine_item),
        *saving_needs(models, ranks, local),
        *rank_needs(config, setting, models),
    ]
    if not setting.on_gpu:
        needs += cpu_engine_needs(config, policy, engine_item)
        on_host = (_on_host(need, local, constants.heap) for need in needs)
        return Estimate(tuple(on_host), None)
    needs += gpu_engine_needs(config, policy, engine_item, setting.device_bytes)
    needs.append(Need(Place.DEVICE, "rank's context", GPU.context))
    room = engine_room(config, policy, engine_item, setting.device_bytes)
    return Estimate(tuple(needs), room)


def rank_needs(config: Config, setting: Setting, models: list[HeldModel]) -> list[Need]:
    """What one rank holds of its device (and, where it offloads, all of a node's of the host)."""
    item = ITEM_BYTES[setting.compute_dtype]
    ranks, local = config.num_ranks, config.trainer.n_gpus_per_node
    if not setting.on_gpu:  # offloading has no effect there
        models = [replace(m, offload=type(m.offload)()) for m in models]
    found = [need for m in models for need in shard_needs(m, ranks, local)]
    found += [need for m in models for need in gathered_needs(m, ranks, item)]
    return [*found, *working_needs(config, setting.policy, setting.critic, item)]


def _on_host(need: Need, local: int, heap: float) -> Need:
    """On CPU a rank's device is the host, which all ranks of the node share."""
    if need.place is not Place.DEVICE:
        return need
    factor = 1.0 if need.phases == ALWAYS else heap
    return replace(need, place=Place.HOST, bytes=int(factor * local * need.bytes))
