"""Reinforcement learning of language-model agents: protocols, algorithms, workers and trainer."""

__version__ = "0.1.0"
