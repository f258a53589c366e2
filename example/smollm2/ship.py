"""Copy the adapter that scored best on dev, with what made it, to where infer.py finds it."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from example.smollm2.shipped import SHIPPED
from search_r1.evaluation.manifest import versions
from verl.errors import DataError, explain

PLACES = ("data_dir", "model")
"""Settings that hold on one machine."""


def score(out: Path, name: str) -> dict[str, float]:
    """EM and F1 of a finished evaluation. Raises DataError."""
    file = out / "evaluation" / name / "metrics.json"
    if not file.is_file():
        fix = "let the stage evaluate run first"
        raise DataError(explain(str(file), "no such file", "a finished evaluation", fix))
    found = json.loads(file.read_text(encoding="utf-8"))["estimates"]["all rows"]
    return {measure: found[measure]["value"] for measure in ("em", "f1")}


def ship(out: Path, target: Path = SHIPPED) -> str:
    """The name of the adapter that was copied: the better EM, then F1."""
    scores = {name: score(out, name) for name in ("sft", "rl")}
    best = max(scores, key=lambda name: (scores[name]["em"], scores[name]["f1"]))
    lines = (out / "settings").read_text(encoding="utf-8").splitlines()
    settings = {n: v for n, _, v in (line.partition("=") for line in lines) if n not in PLACES}
    words = [f"{n}={v}" for n, v in settings.items() if n not in ("budget", "device", "seed")]
    named = " ".join(f"{n.upper()}={settings[n]}" for n in ("budget", "device", "seed"))
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(out / "adapters" / best, target)
    made = {
        "stage": best,
        "command": f"{named} bash example/smollm2/run.sh --set {' '.join(words)}",
        "settings": settings,
        "dev": scores,
        "versions": versions(),
    }
    (target / "made.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return best


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of a run of run.sh")
    print(f"shipped {ship(parser.parse_args().out)} to {SHIPPED}")  # noqa: T201


if __name__ == "__main__":
    main()
