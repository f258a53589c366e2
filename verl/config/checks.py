"""The checks of a run's options, each beside what it checks (`verl.seams.RULES`)."""

from collections.abc import Iterator

from verl import seams
from verl.config import Config


def problems(config: Config) -> Iterator[str]:
    """Yield an error message for each problem that a check finds."""
    for module in seams.plugged(seams.RULES):
        yield from module.problems(config)
