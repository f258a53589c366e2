"""What one check found: figures, bounds that were missed, and why a check was left out."""

from __future__ import annotations

import json
import math
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.files import atomic_write


class Skipped(Exception):
    """The check means nothing here; the text says why."""


class Report:
    """Figures and failures of a check, in a file that is whole after each of them.

    So what a check that is killed had found by then is known too.
    """

    def __init__(self, out: Path, name: str, device: str) -> None:
        """`device` is cuda or cpu; what an earlier run left in the check's folder is removed."""
        self.device, self._path = device, out / f"{name}.json"
        self.folder = out / f"{name}.files"
        """For models, runs and whatever else the check writes."""
        self.figures: dict[str, Any] = {}
        self.failures: list[str] = []
        self.skipped: str | None = None
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.write()

    @property
    def on_card(self) -> bool:
        """Whether the check computes on a GPU."""
        return self.device == "cuda"

    def need_card(self, why: str) -> None:
        """Leave the check out on a CPU. Raises Skipped."""
        if not self.on_card:
            raise Skipped(why)

    def record(self, name: str, value: Any) -> None:
        """A figure that no bound is known for."""
        self.figures[name] = _plain(value)
        self.write()

    def expect(
        self,
        name: str,
        value: float,
        below: float = math.inf,
        above: float = -math.inf,
        equal: float | None = None,
    ) -> None:
        """A figure and its bounds; one that is not finite keeps none."""
        self.record(name, value)
        if equal is not None and value != equal:
            self.fail(f"{name}: got {_plain(value)}, expected {equal}")
        if not above < value < below:
            bounds = " and ".join(
                f"{word} {bound}"
                for word, bound in (("above", above), ("below", below))
                if math.isfinite(bound)
            )
            self.fail(f"{name}: got {_plain(value)}, expected {bounds or 'a finite number'}")

    def fail(self, what: str) -> None:
        """Something that is wrong; the check goes on."""
        self.failures.append(what)
        self.write()

    @contextmanager
    def part(self, name: str = "") -> Iterator[None]:
        """A part of the check: an exception ends it and fails the check, and other parts go on."""
        try:
            yield
        except Skipped as reason:
            self.skipped = str(reason)
        except Exception as error:  # noqa: BLE001 - whatever it raises is what the check found
            traceback.print_exception(error)  # to its log
            first = (str(error).strip().splitlines() or [""])[0]
            self.fail(f"{name}{': ' if name else ''}{type(error).__name__}: {first[:300]}")

    def write(self, done: bool = False) -> None:
        """Bring the file up to date; `done`: the check came to its end."""
        found = {"figures": self.figures, "failures": self.failures, "skipped": self.skipped}
        with atomic_write(self._path) as part:
            part.write_text(json.dumps(found | {"done": done}))


def _plain(value: Any) -> Any:
    """Six digits of a float; one that is not finite as text, which JSON has no number for."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)
