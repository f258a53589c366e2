"""Rollout: engines that continue token ids, and the replicas that Ray hosts them in."""
