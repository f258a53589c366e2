"""Rewards as the trainer sees them: the interface, and stages of rewards."""
