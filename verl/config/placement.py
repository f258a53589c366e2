"""Where training ranks, the critic and the engines of a run are placed, in numbers.

Ray assigns the actual devices (`verl.single_controller.placement`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.config import Config


@dataclass(frozen=True)
class Placement:
    """The plan of a run's devices; engines share those of the ranks unless it says otherwise."""

    num_nodes: int
    """Nodes that hold the actor's ranks, and the engines that the run starts."""
    ranks_per_node: int
    """Training ranks per node, without those of a critic on its own devices."""
    sp_size: int
    """Ranks in a sequence-parallel group of the actor."""
    critic_gpus_per_node: int
    """GPUs per node reserved for the critic; 0 if it shares the actor's."""
    critic_nodes: int
    """Nodes that hold the GPUs of a critic with its own devices."""
    critic_sp_size: int
    """Ranks in a sequence-parallel group of the critic."""
    own_engine_gpus: int
    """GPUs per node reserved for engines; 0 if they share the ranks'."""
    engine_size: int
    """GPUs of one engine (tensor parallelism)."""
    num_replicas: int | None
    """Engines that the options ask for; null: as many as fit."""
    servers: tuple[str, ...]
    """Addresses of the user's servers, one engine each; empty if the run starts its own."""

    @property
    def num_ranks(self) -> int:
        """Training ranks over all nodes, without those of a critic on its own devices."""
        return self.ranks_per_node * self.num_nodes

    @property
    def num_sp_groups(self) -> int:
        """Sequence-parallel groups of the actor's ranks, over all nodes."""
        return self.num_ranks // self.sp_size

    @property
    def has_own_critic(self) -> bool:
        """Whether the critic has its own ranks and devices, separate from the actor's."""
        return self.critic_gpus_per_node > 0

    @property
    def num_critic_ranks(self) -> int:
        """Number of ranks that hold the critic: its own, or the actor's."""
        return self.critic_gpus_per_node * self.critic_nodes or self.num_ranks

    @property
    def num_critic_sp_groups(self) -> int:
        """Sequence-parallel groups of the ranks that hold a critic, over all nodes."""
        return self.num_critic_ranks // self.critic_sp_size

    @property
    def is_split(self) -> bool:
        """Whether engines have their own devices, separate from the ranks'."""
        return self.own_engine_gpus > 0

    @property
    def is_external(self) -> bool:
        """Whether the engines are servers that the user started and that load new weights."""
        return bool(self.servers)

    @property
    def is_colocated(self) -> bool:
        """Whether engines share the ranks' devices; on GPUs they take turns."""
        return not self.is_split and not self.is_external

    @property
    def engine_gpus_per_node(self) -> int:
        """GPUs per node that engines use: their own, or the ranks'."""
        return self.own_engine_gpus or self.ranks_per_node

    @property
    def engine_slots(self) -> int:
        """Number of engines that fit on the GPUs of all nodes; an engine does not span nodes."""
        return self.engine_gpus_per_node // self.engine_size * self.num_nodes

    @property
    def gpus_per_node(self) -> int:
        """Maximum GPUs per node that ranks, engines and a critic with its own devices use."""
        return self.ranks_per_node + self.own_engine_gpus + self.critic_gpus_per_node

    @property
    def num_gpus(self) -> int:
        """GPUs of the run over all nodes."""
        shared = (self.ranks_per_node + self.own_engine_gpus) * self.num_nodes
        return shared + self.critic_gpus_per_node * self.critic_nodes

    def num_engines(self, on_gpu: bool) -> int:
        """Number of rollout engines over all nodes."""
        if self.is_external:
            return len(self.servers)
        return self.num_replicas or (self.engine_slots if on_gpu else self.num_nodes)


def plan(config: Config) -> Placement:
    """Return the placement that the options of a run describe."""
    trainer, critic, policy = config.trainer, config.critic, config.actor_rollout_ref
    rollout, sp_size = policy.rollout, policy.actor.ulysses_sequence_parallel_size
    url = None if rollout.name == "remote" else rollout.url
    urls = url if isinstance(url, list) else [str(url)]
    return Placement(
        num_nodes=trainer.nnodes,
        ranks_per_node=trainer.n_gpus_per_node,
        sp_size=sp_size,
        critic_gpus_per_node=critic.n_gpus_per_node or 0,
        critic_nodes=critic.nnodes or trainer.nnodes,
        critic_sp_size=critic.ulysses_sequence_parallel_size or sp_size,
        own_engine_gpus=trainer.rollout_gpus,
        engine_size=rollout.tensor_model_parallel_size,
        num_replicas=rollout.num_replicas,
        servers=() if url is None else tuple(urls),
    )
