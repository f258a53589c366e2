"""The stages that measure what came out, and ship it."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from example.smollm2.recipe import Recipe
from example.smollm2.settings import settings_of
from example.smollm2.shipped import SHIPPED
from search_r1.evaluation.cli import main as evaluate
from search_r1.evaluation.manifest import versions
from search_r1.evaluation.store import METRICS
from search_r1.evaluation.summary import ROWS
from search_r1.evaluation.untagged import READ, WRONG
from verl.errors import DataError, explain

EMPTY = "empty"
PLACES = ("out", "data_dir", "model")
"""Settings that hold on one machine."""
MEASURES = ("em", "f1", "answer_in_documents", "searches")
PAIRS = (("before", "sft"), ("sft", "rl"), ("before", "rl"), ("rag", "rl"))
"""Evaluations that are compared question by question: the second minus the first."""
BASELINE_RESPONSE = 256
"""Tokens that a baseline may write: the base model is not as brief as the agent."""


@dataclass(frozen=True)
class Plan:
    """One evaluation on the dev rows."""

    name: str
    adapter: str | None = None
    """Folder below adapters/; None for the base itself."""
    retriever: str = "bm25"
    """bm25, random or empty."""
    method: str = "agent"
    """agent, direct (closed book) or rag."""

    @property
    def untagged(self) -> str:
        """The base does not know the tags: its replies are read. Adapters were taught them."""
        return WRONG if self.adapter else READ


PLANS = (
    Plan("before"),
    Plan("sft", adapter="sft"),
    Plan("rl", adapter="rl"),
    Plan("rl-empty", adapter="rl", retriever=EMPTY),
    Plan("rl-random", adapter="rl", retriever="random"),
    Plan("direct", method="direct"),
    Plan("rag", method="rag"),
)


def measure(recipe: Recipe) -> None:
    """Every evaluation (finished ones are only summed up again), then table.md."""
    with recipe.retriever() as bm25, recipe.retriever("random") as random:
        addresses = {"bm25": bm25, "random": random, EMPTY: EMPTY}
        for plan in PLANS:
            recipe.console.print(f"evaluating {plan.name}")
            recipe.python("-m", "search_r1.evaluate", "run",
                          *options(recipe, plan, addresses[plan.retriever]))  # fmt: skip
    table = write_table(recipe)
    recipe.console.print(f"the figures are in {table}")


def options(recipe: Recipe, plan: Plan, address: str) -> list[str]:
    """What `python -m search_r1.evaluate run` is told."""
    settings = recipe.settings
    is_agent = plan.method == "agent"
    # Documents stand in the prompt of RAG; the base model is told more there, too.
    start = settings.max_start_length if is_agent else settings.max_prompt_length
    response = settings.max_response_length if is_agent else BASELINE_RESPONSE
    given = {
        "model": recipe.settings.model,  # as it is named, so that tables name no machine's folders
        "data": recipe.dev,
        "out": recipe.out / "evaluation" / plan.name,
        "method": plan.method,
        "untagged": plan.untagged,
        "retriever-url": address,
        "adapter": recipe.out / "adapters" / plan.adapter if plan.adapter else None,
        "topk": settings.topk,
        "template": settings.template,
        "max-turns": settings.max_turns,
        "max-start-length": start,
        "max-prompt-length": settings.max_prompt_length,
        "max-response-length": response,
        "max-obs-length": settings.max_obs_length,
        "num-rows": settings.eval_rows,
        "seed": settings.seed,
        "concurrency": 64 if settings.device == "cpu" else 256,
        "device": settings.device,
    }
    return [word for name, value in given.items() if value is not None
            for word in (f"--{name}", str(value))]  # fmt: skip


def write_table(recipe: Recipe) -> Path:
    """table.md: each measure of all evaluations, then the paired comparisons."""
    folder = recipe.out / "evaluation"
    parts = [f"# SmolLM2-135M-Instruct, budget {recipe.settings.budget}, "
             f"{recipe.settings.device}, seed {recipe.settings.seed}"]  # fmt: skip
    folders = [str(folder / plan.name) for plan in PLANS]
    for name in MEASURES:
        found = _said("table", *folders, "--measure", name)
        what, figures = found.split("\n\n")[:2]
        parts += [f"## {name}", figures] if len(parts) > 1 else [what, f"## {name}", figures]
    parts += ["## use of searching", *found.split("\n\n")[2:]]
    for first, second in PAIRS:
        for name in ("em", "f1"):
            found = _said("compare", str(folder / second), str(folder / first), "--measure", name)
            parts += [f"## {second} against {first}: {name}", found]
    file = recipe.out / "table.md"
    file.write_text("\n\n".join(part.strip() for part in parts) + "\n", encoding="utf-8")
    return file


def _said(*words: str) -> str:
    """What a command of the evaluation prints. Raises DataError when it refuses."""
    said = io.StringIO()
    with redirect_stdout(said):
        if evaluate(words):
            fix = "let the stage evaluate finish"
            raise DataError(explain(" ".join(words[:2]), "an error, see above", "a table", fix))
    return said.getvalue()


def ship(recipe: Recipe) -> None:
    """Copy the adapter that scored best on dev, with what made it, to where infer.py finds it."""
    scores = {name: score(recipe, name) for name in ("sft", "rl")}
    best = max(scores, key=lambda name: (scores[name]["em"], scores[name]["f1"]))
    shutil.rmtree(SHIPPED, ignore_errors=True)
    shutil.copytree(recipe.out / "adapters" / best, SHIPPED)
    made = {
        "stage": best,
        "command": " ".join(command(recipe)),
        "settings": {n: v for n, v in recipe.settings.record().items() if n not in PLACES},
        "dev": scores,
        "rows": recipe.settings.eval_rows or "all",
        "versions": versions(),
    }
    (SHIPPED / "made.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    recipe.console.print(f"shipped {best} to {SHIPPED}")


def command(recipe: Recipe) -> Iterator[str]:
    """The command that makes this run again, given the data and the base."""
    settings = recipe.settings
    yield from (f"BUDGET={settings.budget}", f"DEVICE={settings.device}", f"SEED={settings.seed}")
    yield from ("bash", "example/smollm2/run.sh")
    usual = settings_of(settings.budget, settings.device, seed=settings.seed)
    own = [(n, v) for n, v in vars(settings).items() if n not in PLACES and v != vars(usual)[n]]
    if own:
        yield "--set"
        yield from (f"{name}={'null' if value is None else value}" for name, value in own)


def score(recipe: Recipe, name: str) -> dict[str, float]:
    """EM and F1 of a finished evaluation. Raises DataError."""
    file = recipe.out / "evaluation" / name / METRICS
    if not file.is_file():
        fix = "let the stage evaluate run first"
        raise DataError(explain(str(file), "no such file", "a finished evaluation", fix))
    found = json.loads(file.read_text(encoding="utf-8"))["estimates"][ROWS]
    return {measure: found[measure]["value"] for measure in ("em", "f1")}
