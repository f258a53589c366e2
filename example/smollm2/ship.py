"""Copy the adapter with the best scores on `select`, and its settings, for infer.py to find."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

from search_r1.evaluation.manifest import versions
from verl.errors import DataError, explain

SHIPPED = Path(__file__).with_name("adapter")
"""Folder of the adapter that infer.py uses without a model, with its settings in `made.json`."""
MACHINE_SETTINGS = ("data_dir", "model")
"""Settings that are valid on one machine only."""


def score(out: Path, name: str) -> dict[str, float]:
    """Return EM and F1 of a finished evaluation. Raises DataError."""
    file = out / "evaluation" / name / "metrics.json"
    if not file.is_file():
        fix = "let the stage evaluate run first"
        raise DataError(explain(str(file), "no such file", "a finished evaluation", fix))
    estimates = json.loads(file.read_text(encoding="utf-8"))["estimates"]["all rows"]
    return {measure: estimates[measure]["value"] for measure in ("em", "f1")}


def made_of(folder: Path) -> dict[str, Any]:
    """Return how an adapter was made on which this one was trained, and which it replaces."""
    file = folder / "made.json"
    return {"sft_start": json.loads(file.read_text(encoding="utf-8"))} if file.is_file() else {}


def ship(out: Path, target: Path = SHIPPED) -> str:
    """Copy the adapter with the better EM, then F1, on `select` to `target` and return its name."""
    names = ("sft", "rl") if (out / "adapters" / "rl").is_dir() else ("sft",)
    chosen_by = {name: score(out, f"select-{name}") for name in names}
    best = max(chosen_by, key=lambda name: (chosen_by[name]["em"], chosen_by[name]["f1"]))
    lines = (out / "settings").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("=")[::2] for line in lines)
    settings = {name: value for name, value in pairs if name not in MACHINE_SETTINGS}
    in_environment = ("budget", "device", "seed")
    variables = " ".join(f"{name.upper()}={settings[name]}" for name in in_environment)
    others = (f"{n}={v}" for n, v in settings.items() if n not in in_environment)
    arguments = shlex.join(others)
    started = Path(settings.get("sft_start", "none")).resolve() == target.resolve()
    start = made_of(target) if started else {}
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(out / "adapters" / best, target)
    made = {
        "stage": best,
        "command": f"{variables} bash example/smollm2/run.sh --set {arguments}",
        "settings": settings,
        "select": chosen_by,
        "dev": {name: score(out, name) for name in chosen_by},
        "versions": versions(),
        **start,
    }
    (target / "made.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="output folder of run.sh")
    print(f"shipped {ship(parser.parse_args().out)} to {SHIPPED}")  # noqa: T201


if __name__ == "__main__":
    main()
