"""How a contender takes its turns: it imports nothing that must be installed.

The benchmark writes the number of a piece of work, and how to do it, as a line; the contender does
it and answers with a line of JSON. Whatever else it prints goes to its standard error. In between
it waits for the next line, so that it takes nothing from whoever's turn it is.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path


def arguments(more: tuple[str, type]) -> argparse.Namespace:
    """What a contender is started with: a model, the work, trajectories at a time, and one more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("work", type=Path)
    parser.add_argument("--micro", type=int, required=True)
    parser.add_argument(more[0], type=more[1], required=True)
    return parser.parse_args()


class Turns:
    """The contender's end, with the clocks of the present turn."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self.way = ""
        """How the present work is to be done, where there are several ways."""
        self._began = (0.0, 0.0)
        self._took = (0.0, 0.0)

    def wait(self) -> int:
        """The number of the work that is asked for; its clocks run from now on.

        Raises SystemExit when nothing more is asked for.
        """
        line = sys.stdin.readline()
        if not line:
            raise SystemExit(0)
        self._began = (time.perf_counter(), time.process_time())
        number, _, self.way = line.rstrip("\n").partition(" ")
        return int(number)

    def stop(self) -> None:
        """The work is done."""
        now = (time.perf_counter(), time.process_time())
        self._took = (now[0] - self._began[0], now[1] - self._began[1])

    def answer(self, **facts: float) -> None:
        """Tell the seconds of clock and processor, the most memory so far, and `facts`."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
        seconds, cpu = self._took
        line = {"seconds": seconds, "cpu": cpu, "peak_gib": peak, **facts}
        self._answers.write(json.dumps(line) + "\n")
