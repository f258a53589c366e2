"""A tracker that keeps its records for the test to read."""

from collections.abc import Mapping

from verl.monitor.tracking import Tracker


class MemoryTracker(Tracker):
    """Keeps (step, metrics) in a list."""

    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.records.append((step, dict(metrics)))

    def rewind(self, step: int | None) -> None:
        self.records = [record for record in self.records if step is not None and record[0] <= step]
