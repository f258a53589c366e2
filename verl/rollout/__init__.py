"""Rollout: the replica that Ray hosts, and the engines that continue token ids."""

from verl.rollout.replica import RolloutReplica

__all__ = ["RolloutReplica"]
