"""Faults of every kind during real runs: what each did, and the result of the training."""
