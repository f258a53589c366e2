"""Reinforcement learning of language-model agents: protocols, algorithms, workers and trainer."""

from verl.threads import wait_passively

__version__ = "0.1.0"

wait_passively()
