"""Faults of every kind over real runs: what each did, and what came of the training."""
