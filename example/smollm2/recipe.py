"""The stages in order, each skipped when it is finished; what each does is in the other modules."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from example.smollm2.settings import Settings, estimate
from scripts.processes import run
from search_r1.search.local_server import LocalServer
from verl.errors import ConfigError, DataError, explain

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
SETTINGS_FILE = "settings.json"
FOLDERS = {"sft": "sft", "rl": "rl", "eval": "evaluation"}
"""What the settings of such a prefix decide; all others decide everything."""
DATA_FILES = ("corpus.jsonl", "train.jsonl", "dev.jsonl")


@dataclass
class Recipe:
    """One run of the recipe: its settings, its folder, and how it starts other programs."""

    settings: Settings
    console: Console = field(default_factory=Console)

    @property
    def out(self) -> Path:
        """Where everything is written; absolute."""
        return self.settings.out.resolve()

    @property
    def base(self) -> Path:
        """The base model's folder; a relative one is below the repository."""
        return ROOT / self.settings.model

    @property
    def data(self) -> Path:
        """Rows, corpus and dialogues as the stages use them."""
        return self.out / "data"

    @property
    def index(self) -> Path:
        """Of BM25."""
        return self.out / "index"

    @property
    def dev(self) -> Path:
        """The questions that everything is evaluated on."""
        return self.data / "dev.parquet"

    @property
    def dialogue(self) -> dict[str, str | int]:
        """How the agent is trained to talk: `search_r1.json` of a model or adapter."""
        settings = self.settings
        return {
            "template": settings.template,
            "max_turns": settings.max_turns,
            "topk": settings.topk,
        }

    def python(self, *arguments: str) -> None:
        """Run a program of ours to its end; raises CalledProcessError when it fails."""
        run([sys.executable, *arguments], ROOT, self.environment())

    def environment(self, **more: str) -> dict[str, str]:
        """That of the programs that are started."""
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        return {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": paths, **more}

    @contextlib.contextmanager
    def retriever(self, kind: str = "bm25") -> Iterator[str]:
        """Address of a search server over the corpus, which ends with the context."""
        arguments = ["--retriever_name", kind, "--corpus_path", str(self.data / "corpus.jsonl")]
        arguments += ["--topk", str(self.settings.topk)]
        if kind == "bm25":
            arguments += ["--index_path", str(self.index)]
        with LocalServer(arguments, log_path=self.out / "logs" / f"{kind}.log") as server:
            yield f"{server.url}/retrieve"


Stage = Callable[[Recipe], None]


def play(recipe: Recipe, stages: Mapping[str, Stage], names: Sequence[str]) -> None:
    """Run the named stages that are not finished.

    Raises ConfigError for a folder of other settings, and DataError for missing data.
    """
    claim(recipe)
    show(recipe, names)
    for name in names:
        marker = recipe.out / "done" / f"{name}.json"
        if marker.is_file():
            recipe.console.print(f"{name}: finished before, skipped")
            continue
        recipe.console.rule(f"[bold]{name}")
        start = time.time()
        stages[name](recipe)
        minutes = round((time.time() - start) / 60, 2)
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(json.dumps({"minutes": minutes}) + "\n", encoding="utf-8")
        recipe.console.print(f"{name}: done in {minutes:.1f} min")


def claim(recipe: Recipe) -> None:
    """Write the settings into the folder; those that decided what is there must be the same.

    What only stages that have left nothing yet are told may change. Raises ConfigError.
    """
    file = recipe.out / SETTINGS_FILE
    wanted = json.loads(json.dumps(recipe.settings.record()))
    if file.is_file():
        there = json.loads(file.read_text(encoding="utf-8"))
        differing = [name for name in {**there, **wanted} if there.get(name) != wanted.get(name)]
        names = [name for name in differing if _is_settled(recipe, name)]
        if names:
            got = ", ".join(f"{name}={wanted.get(name)}" for name in names)
            expected = ", ".join(f"{name}={there.get(name)}" for name in names)
            fix = "go on with the same settings, or give another --out"
            raise ConfigError(explain(str(recipe.out), got, f"{expected}, as it began", fix))
        if not differing:
            return
    else:
        check_data(recipe.settings.data_dir)
        recipe.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")


def _is_settled(recipe: Recipe, name: str) -> bool:
    """Whether something is there that this setting decided."""
    folder = FOLDERS.get(name.partition("_")[0])
    return folder is None or (recipe.out / folder).is_dir()


def check_data(folder: Path) -> None:
    """Refuse a folder that lacks questions or corpus."""
    missing = [name for name in DATA_FILES if not (folder / name).is_file()]
    if missing:
        fix = (
            "build data/small_hotpotqa: python scripts/data_process/small_hotpotqa.py; or name "
            "the folder that holds them: DATA_DIR=… or --data-dir"
        )
        expected = f"{', '.join(DATA_FILES)}"
        raise DataError(explain(f"data folder {folder}", f"no {missing[0]}", expected, fix))


def show(recipe: Recipe, names: Sequence[str]) -> None:
    """Print what is about to happen, and how long it should take."""
    settings = recipe.settings
    expected = [(name, minutes) for name, minutes in estimate(settings) if name in names]
    total = sum(minutes for _, minutes in expected)
    words = ", ".join(f"{name} {minutes:.1f}" for name, minutes in expected)
    recipe.console.print(
        f"budget {settings.budget} on {settings.device}, writing to {recipe.out}; "
        f"expected minutes: {words}; together {total:.0f}"
    )
