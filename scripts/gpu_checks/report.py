"""What one check found: figures, bounds that were missed, and why a check was left out."""

from __future__ import annotations

import json
import math
import os
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any


class Skipped(Exception):
    """The check means nothing here; the text says why."""


class Report:
    """Figures and failures of a check, in a file that is whole after each of them.

    As a context it takes note of the exception that ends the check. What a check that is killed
    had found by then is in the file too.
    """

    def __init__(self, path: Path, device: str, folder: Path) -> None:
        """`device` is cuda or cpu; `folder` is the check's own, for models and runs."""
        self.device, self.folder, self._path = device, folder, path
        self.figures: dict[str, Any] = {}
        self.failures: list[str] = []
        self.skipped: str | None = None
        self.is_done = False
        folder.mkdir(parents=True, exist_ok=True)
        self._write()

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
        self._write()

    def expect(
        self,
        name: str,
        value: float,
        below: float | None = None,
        above: float | None = None,
        equal: float | None = None,
    ) -> None:
        """A figure and its bounds; NaN keeps none."""
        self.record(name, value)
        for holds, bound in (
            (below is None or value < below, f"below {below}"),
            (above is None or value > above, f"above {above}"),
            (equal is None or value == equal, f"{equal}"),
        ):
            if not holds:
                self.fail(f"{name}: got {_plain(value)}, expected {bound}")

    def fail(self, what: str) -> None:
        """Something that is wrong; the check goes on."""
        self.failures.append(what)
        self._write()

    def part(self, name: str) -> Part:
        """A context whose end by an exception fails the check, and lets its other parts go on."""
        return Part(self, name)

    def note(self, error: BaseException, name: str = "") -> None:
        """An exception as a failure; its traceback goes to the log."""
        traceback.print_exception(error)
        text = str(error).strip().splitlines() or [""]
        self.fail(f"{name}{': ' if name else ''}{type(error).__name__}: {text[0][:300]}")

    def _write(self) -> None:
        found = {"figures": self.figures, "failures": self.failures, "skipped": self.skipped,
                 "done": self.is_done}  # fmt: skip
        part = self._path.with_name(f".{self._path.name}")
        part.write_text(json.dumps(found))
        os.replace(part, self._path)

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        self.is_done = True
        if isinstance(error, Skipped):
            self.skipped = str(error)
        elif error is not None:
            self.note(error)
        self._write()
        return isinstance(error, Exception)


class Part:
    """The context of `Report.part`."""

    def __init__(self, report: Report, name: str) -> None:
        self._report, self._name = report, name

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, Skipped):
            return False
        self._report.note(error, self._name)
        return True


def _plain(value: Any) -> Any:
    """Six digits of a float; one that is not finite as text, which JSON has no number for."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)
