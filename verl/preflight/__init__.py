"""Checks before a run starts: the machine, its memory, models, adapters and files."""
