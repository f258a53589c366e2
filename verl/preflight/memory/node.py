"""What a node holds besides shards: processes, batches, weights on their way, files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verl.config import Config
from verl.preflight.memory.needs import FLOAT, LOADED, Constants, Need, Phase, Place
from verl.preflight.memory.ranks import HeldModel
from verl.preflight.memory.shape import ModelShape
from verl.training.devices import engine_takes_adapter
from verl.training.weights import SHARD_BYTES

BATCH_BYTES = 160
"""Host bytes a token of a step's trajectories: ids as Python numbers (twice 40), eight token
columns of the batch in the driver, and once more in Ray's object store."""


def process_needs(config: Config, constants: Constants, on_gpu: bool) -> Iterator[Need]:
    """Processes before they load anything."""
    local = config.trainer.n_gpus_per_node
    replicas = -(-config.num_engines(on_gpu) // config.trainer.nnodes)
    for what, size in (
        ("processes of the ranks", local * constants.rank),
        ("processes of the engines", replicas * constants.engine),
        ("driver and Ray", constants.driver),
    ):
        yield Need(Place.HOST, what, size, is_guess=True)


def batch_needs(config: Config) -> Iterator[Need]:
    """A step's trajectories, all of them as long as they may be."""
    tokens = config.num_trajectories * config.data.max_model_len
    yield Need(Place.HOST, "trajectories of a step", BATCH_BYTES * tokens, LOADED)


def hand_over_needs(config: Config, policy: ModelShape, item: int) -> Iterator[Need]:
    """Weights on their way: a folder in shared memory that stays, and what is being written.

    Whole tensors are gathered one at a time, collected up to SHARD_BYTES by the first rank of a
    node, and each file is written beside the one it replaces. Of an adapter, that alone travels.
    """
    model = config.actor_rollout_ref.model
    if engine_takes_adapter(config):
        size = FLOAT * policy.adapter(model.lora_rank, model.target_modules)
        yield Need(Place.SHARED, "weights for the engines", 2 * size, LOADED)
        return
    size = item * policy.parameters()
    part, largest = min(size, SHARD_BYTES), max(policy.tensors())
    passing = frozenset({Phase.HAND_OVER})
    yield Need(Place.SHARED, "weights for the engines", size, LOADED)
    yield Need(Place.SHARED, "their next file", part, passing)
    yield Need(Place.HOST, "weights being written", part, passing)
    yield Need(Place.DEVICE, "largest tensor, whole", (FLOAT + item) * largest, passing)


def saving_needs(models: Sequence[HeldModel], num_ranks: int, local: int) -> Iterator[Need]:
    """A checkpoint in the making: each rank copies its shards of what is trained to the host.

    Where there is no room for the copy, training waits until the shards are written.
    """
    values = sum(m.learned for m in models) // num_ranks
    size = local * 3 * FLOAT * values
    yield Need(Place.HOST, "copy of the shards being saved", size, frozenset({Phase.SAVE}), True)
