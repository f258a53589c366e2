"""Trackers on top of libraries: `trainer.logger=[NAME]` uses `NAME.py` and the package NAME."""
