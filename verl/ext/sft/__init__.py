"""Supervised fine-tuning on demonstrations, and rejection sampling of trajectories."""
