"""Where training ranks, the critic and the engines of a run are placed, in numbers.

Ray assigns the actual devices (`verl.single_controller.placement`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from verl.errors import ConfigError, explain

if TYPE_CHECKING:
    from verl.config import Config


@dataclass(frozen=True)
class RankPlan:
    """The training ranks that hold a role: actor, reference or critic."""

    group: str
    """Name of the group of ranks; roles of the same group share its devices."""
    num_nodes: int
    per_node: int
    """Ranks on each of the nodes."""
    ranks_per_shard: int
    """Ranks that get the same share of a batch, and compute it together."""

    @property
    def num_ranks(self) -> int:
        """Ranks over all nodes."""
        return self.per_node * self.num_nodes

    @property
    def num_shards(self) -> int:
        """Shares that a batch is divided into, over all nodes."""
        return self.num_ranks // self.ranks_per_shard


@dataclass(frozen=True)
class Placement:
    """The plan of a run's devices; engines share those of the ranks unless it says otherwise."""

    roles: Mapping[str, RankPlan]
    """Where each role is; the first is the actor, whose nodes hold the run's engines too."""
    own_engine_gpus: int
    """GPUs per node reserved for engines; 0 if they share the ranks'."""
    engine_size: int
    """GPUs of one engine (tensor parallelism); 0 for the user's servers, which have their own."""
    num_replicas: int | None
    """Engines that the options ask for: one for each server; null: as many as fit."""
    servers: tuple[str, ...]
    """Addresses of the user's servers, one engine each; empty if the run starts its own."""
    patience_s: float
    """Seconds that a run waits for its nodes, and ranks at least for each other."""

    @property
    def actor(self) -> RankPlan:
        """Where the actor is."""
        return self.roles["actor"]

    @property
    def critic(self) -> RankPlan:
        """Where the critic is, if the run has one."""
        return self.roles["critic"]

    @property
    def groups(self) -> dict[str, RankPlan]:
        """The groups of ranks by name, the actor's first."""
        return {plan.group: plan for plan in self.roles.values()}

    def roles_of(self, group: str) -> tuple[str, ...]:
        """Return the roles that a group of ranks holds."""
        return tuple(role for role, plan in self.roles.items() if plan.group == group)

    def is_apart(self, role: str) -> bool:
        """Whether a role has other ranks and devices than the actor."""
        return self.roles[role].group != self.actor.group

    @property
    def is_split(self) -> bool:
        """Whether engines have their own devices, separate from the ranks'."""
        return self.own_engine_gpus > 0

    @property
    def is_colocated(self) -> bool:
        """Whether engines share the ranks' devices; on GPUs they take turns."""
        return not self.is_split and self.engine_size > 0

    @property
    def engine_gpus_per_node(self) -> int:
        """GPUs per node that engines use: their own, or the actor's."""
        return self.own_engine_gpus or self.actor.per_node

    @property
    def max_engines(self) -> int:
        """Number of engines that fit on the GPUs of all nodes; an engine does not span nodes."""
        return self.engine_gpus_per_node // self.engine_size * self.actor.num_nodes

    @property
    def gpus_per_node(self) -> int:
        """Maximum GPUs per node that ranks and engines use."""
        return self.own_engine_gpus + sum(group.per_node for group in self.groups.values())

    @property
    def num_gpus(self) -> int:
        """GPUs of the run over all nodes."""
        own = self.own_engine_gpus * self.actor.num_nodes
        return own + sum(group.num_ranks for group in self.groups.values())

    def num_engines(self, on_gpu: bool) -> int:
        """Number of rollout engines over all nodes."""
        return self.num_replicas or (self.max_engines if on_gpu else self.actor.num_nodes)

    def check_engines(self, on_gpu: bool) -> None:
        """Raise ConfigError if engines have too few GPUs."""
        if not on_gpu or self.engine_size == 0:
            return
        if self.num_engines(on_gpu) > self.max_engines:
            key = "actor_rollout_ref.rollout.num_replicas"
            expected = f"at most {self.max_engines}: no more fit on the engines' GPUs"
            raise ConfigError(explain(key, self.num_engines(on_gpu), expected, f"{key}=null"))


def plan(config: Config) -> Placement:
    """Return the placement that the options of a run describe."""
    trainer, critic, policy = config.trainer, config.critic, config.actor_rollout_ref
    rollout, servers = policy.rollout, policy.rollout.servers
    num_ranks, together = trainer.n_gpus_per_node, policy.actor.ranks_per_shard
    actor = RankPlan("rank", trainer.nnodes, num_ranks, together)
    own = replace(actor, group="critic rank", per_node=critic.n_gpus_per_node or 0)
    return Placement(
        roles={"actor": actor, "reference": actor, "critic": own if own.per_node else actor},
        own_engine_gpus=trainer.rollout_gpus,
        engine_size=0 if servers else rollout.tensor_model_parallel_size,
        num_replicas=len(servers) or rollout.num_replicas,
        servers=servers,
        patience_s=trainer.node_timeout,
    )
