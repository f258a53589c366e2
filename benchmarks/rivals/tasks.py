"""The worker's side of the pipe to the benchmark; it needs the standard library only.

The benchmark writes a task as one line: the number of the work and the mode. The worker does the
work and answers with a line of JSON. Everything else that it prints goes to its standard error.
Between tasks it waits for the next line, so that it takes no time from the other workers.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

MATRIX_RATE = -1
"""Number of the task that measures the machine instead of making an update."""


def parse_arguments(option: tuple[str, type]) -> argparse.Namespace:
    """Parse a worker's arguments: model, file of the work, micro-batch size, and one `option`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("work", type=Path)
    parser.add_argument("--micro", type=int, required=True)
    parser.add_argument(option[0], type=option[1], required=True)
    return parser.parse_args()


class TaskPipe:
    """Receives tasks, measures their time, and sends the answers."""

    def __init__(self) -> None:
        # Answers keep the original standard output; other output is redirected to standard error.
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self.mode = ""
        """Mode of the current task; empty for the default."""
        self._began = 0.0
        self._began_cpu = 0.0
        self._seconds = 0.0
        self._cpu = 0.0

    def wait(self) -> int:
        """Wait for a task, start its clocks, and return its number.

        Raises SystemExit when there are no more tasks.
        """
        line = sys.stdin.readline()
        if not line:
            raise SystemExit(0)
        self._began, self._began_cpu = time.perf_counter(), time.process_time()
        number, _, self.mode = line.rstrip("\n").partition(" ")
        return int(number)

    def stop(self) -> None:
        """Stop the clocks of the current task."""
        self._seconds = time.perf_counter() - self._began
        self._cpu = time.process_time() - self._began_cpu

    def answer(self, **values: float) -> None:
        """Send the elapsed and processor seconds, the peak memory so far, and `values`."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
        answer = {"seconds": self._seconds, "cpu": self._cpu, "peak_gib": peak, **values}
        self._answers.write(json.dumps(answer) + "\n")
