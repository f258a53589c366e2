"""From question files to batches of prompts, recorded trajectories, and `python -m verl.data`.

This package knows neither tools nor Ray.
"""
