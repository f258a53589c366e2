"""The report of one check: figures, failures, and the reason if the check was skipped."""

import importlib.util
import json
import math
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.files import atomic_write

NOTE = "note"
"""The figure that says what a check that passed has left out."""


class Skipped(Exception):
    """Raised if a check does not apply here; the text is the reason."""


class Report:
    """Figures and failures of a check, in a file that is complete after each change.

    So the findings of a killed check are not lost.
    """

    def __init__(self, out: Path, name: str, device: str) -> None:
        """`device` is cuda or cpu. Files of an earlier run of the check are removed."""
        self.device, self._path = device, out / f"{name}.json"
        self.folder = out / f"{name}.files"
        """Folder for models, runs and other files of the check."""
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
        """Raise Skipped with the reason `why` on a CPU."""
        if not self.on_card:
            raise Skipped(why)

    def need_vllm(self) -> None:
        """Raise Skipped if vLLM is not installed; one that cannot be imported fails the check."""
        if not has_vllm():
            raise Skipped("vLLM is not installed here")

    def record(self, name: str, value: Any) -> None:
        """Record a figure without bounds."""
        self.figures[name] = _plain(value)
        self.write()

    def expect(
        self, name: str, value: float, below: float = math.inf, above: float = -math.inf,
        equal: float | None = None,
    ) -> None:  # fmt: skip
        """Record a figure, and a failure if it violates a bound or is not finite."""
        self.record(name, value)
        if equal is not None and value != equal:
            self.fail(f"{name}: got {_plain(value)}, expected {equal}")
        if not above < value < below:
            limits = {"above": above, "below": below}.items()
            bounds = " and ".join(f"{word} {x}" for word, x in limits if math.isfinite(x))
            self.fail(f"{name}: got {_plain(value)}, expected {bounds or 'a finite number'}")

    def fail(self, message: str) -> None:
        """Record a failure; the check continues."""
        self.failures.append(message)
        self.write()

    @contextmanager
    def part(self, name: str = "") -> Iterator[None]:
        """Run a part of the check; an exception fails the check but not its other parts."""
        try:
            yield
        except Skipped as reason:
            self.skipped = str(reason)
        except Exception as error:  # noqa: BLE001 - any exception is a failure of the check
            traceback.print_exception(error)  # to its log
            first = (str(error).strip().splitlines() or [""])[0]
            self.fail(f"{name}{': ' if name else ''}{type(error).__name__}: {first[:300]}")

    def write(self, done: bool = False) -> None:
        """Write the file; `done`: the check is complete."""
        content = {"figures": self.figures, "failures": self.failures, "skipped": self.skipped}
        with atomic_write(self._path) as part:
            part.write_text(json.dumps(content | {"done": done}))


def has_vllm() -> bool:
    """Whether vLLM is installed, whether or not it can be imported."""
    return importlib.util.find_spec("vllm") is not None


def _plain(value: Any) -> Any:
    """Round a float to six digits; one that is not finite, which JSON lacks, becomes text."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)
