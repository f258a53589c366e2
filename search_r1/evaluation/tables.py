"""Several evaluations in one table, with the questions of equality asked first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_r1.evaluation.comparison import Difference, compare
from search_r1.evaluation.intervals import NUM_RESAMPLES, Interval
from search_r1.evaluation.report import (
    cell,
    corpus_name,
    decoding_name,
    markdown_table,
    model_name,
    retriever_name,
)
from search_r1.evaluation.samples import Sample
from search_r1.evaluation.store import Manifest, differences, read_evaluation
from search_r1.evaluation.summary import MACRO, ROWS, summarize
from search_r1.inference.retriever import CONTROLS
from verl.errors import ConfigError, explain

WITHOUT_DOCUMENTS = ("empty", "random")
"""Retrievers against which searching must show its use."""


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation, read."""

    name: str
    manifest: Manifest
    samples: Sequence[Sample]

    @property
    def retriever(self) -> str:
        """The kind of retriever."""
        return str(self.manifest["retriever"]["retriever"])

    @property
    def corpus(self) -> str | None:
        """What was really searched; none for diagnostics and for methods without search."""
        if self.retriever in CONTROLS:
            return None
        return corpus_name(self.manifest["retriever"].get("corpus", retriever_name(self.manifest)))


def read_all(folders: Sequence[Path], *, is_mixed: bool = False) -> list[Evaluation]:
    """Evaluations under the names of their folders, or their paths where names collide.

    Raises DataError for a folder that holds no finished evaluation, and ConfigError for
    evaluations of different rows (files of other content, other choices of rows) or of more than
    one corpus; with `is_mixed` the user takes these upon himself.
    """
    names = [folder.name for folder in folders]
    found = [
        Evaluation(n if names.count(n) == 1 else str(folder), *read_evaluation(folder))
        for n, folder in zip(names, folders, strict=True)
    ]
    if not is_mixed:
        _check_alike(found)
    return found


def _check_alike(evaluations: Sequence[Evaluation]) -> None:
    first = evaluations[0]
    for other in evaluations[1:]:
        changes = differences(first.manifest["data"], other.manifest["data"], "data")
        if changes:
            got = f"{first.name} and {other.name} differ: {'; '.join(changes[:3])}"
            fix = "evaluate both on the same files and rows, or say --mixed"
            raise ConfigError(explain("data", got, "the same questions", fix))
    corpora = {e.corpus: e.name for e in evaluations if e.corpus is not None}
    if len(corpora) > 1:
        got = "; ".join(f"{name}: {corpus}" for corpus, name in corpora.items())
        fix = "search one corpus in all of them, or say --mixed (the table names each)"
        raise ConfigError(explain("corpus", got, "one corpus", fix))


def table(
    folders: Sequence[Path],
    measure: str = "em",
    *,
    is_mixed: bool = False,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> str:
    """What each evaluation is, the measure on each set with intervals, and what searching brings.

    Raises ConfigError where unequal things would stand side by side.
    """
    evaluations = read_all(folders, is_mixed=is_mixed)
    parts = [_legend(evaluations), _figures(evaluations, measure, num_resamples, seed)]
    utilities = _utilities(evaluations, num_resamples, seed)
    if utilities:
        parts.append(f"Search utility (EM with documents − EM without):\n\n{utilities}")
    return "\n".join(parts)


def _legend(evaluations: Sequence[Evaluation]) -> str:
    heads = ["evaluation", "model", "method", "retriever and corpus", "template", "decoding"]
    rows = [
        [e.name, model_name(e.manifest), e.manifest["method"], retriever_name(e.manifest),
         e.manifest["template"]["name"], decoding_name(e.manifest)]
        for e in evaluations
    ]  # fmt: skip
    return markdown_table(heads, rows)


def _figures(evaluations: Sequence[Evaluation], measure: str, num_resamples: int, seed: int) -> str:
    found = {
        e.name: summarize(e.samples, num_resamples=num_resamples, seed=seed) for e in evaluations
    }
    sets = sorted({s for one in found.values() for s in one.estimates} - {MACRO, ROWS})
    columns = [*sets, MACRO, ROWS] if len(sets) > 1 else sets
    rows = [
        [name, *(cell(measure, one.estimates[c][measure]) if c in one.estimates else "–"
                 for c in columns)]
        for name, one in found.items()
    ]  # fmt: skip
    return markdown_table([measure, *columns], rows)


def _utilities(evaluations: Sequence[Evaluation], num_resamples: int, seed: int) -> str:
    """A row for each pair that differs in its retriever alone, one of the two without use."""
    pairs = [
        (real, control)
        for real in evaluations
        for control in evaluations
        if real.corpus is not None
        and control.retriever in WITHOUT_DOCUMENTS
        and _apart_from_retriever(real.manifest) == _apart_from_retriever(control.manifest)
    ]
    rows = [
        [f"{real.name} − {control.name}", d.where, _points(d.difference), _percent(d.interval),
         _p(d.p_bootstrap)]
        for real, control in pairs
        for d in compare(real.samples, control.samples, num_resamples=num_resamples, seed=seed)
    ]  # fmt: skip
    heads = ["pair", "set", "difference", "95 % interval", "p (bootstrap)"]
    return markdown_table(heads, rows) if rows else ""


def _apart_from_retriever(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in manifest.items() if name != "retriever"}


def comparison_table(
    first: Evaluation, second: Evaluation, found: Sequence[Difference], measure: str
) -> str:
    """The paired differences of two evaluations, and what the two are."""
    heads = ["set", "questions", first.name, second.name, "difference", "95 % interval",
             "p (bootstrap)", "only first", "only second", "p (McNemar)"]  # fmt: skip
    rows = [
        [d.where, str(d.num_questions), f"{100 * d.first:.1f}", f"{100 * d.second:.1f}",
         _points(d.difference), _percent(d.interval), _p(d.p_bootstrap),
         *("–" if n is None else str(n) for n in (d.only_first, d.only_second)), _p(d.p_mcnemar)]
        for d in found
    ]  # fmt: skip
    legend = _legend([first, second])
    return f"{legend}\n{measure}, first minus second, in points:\n\n{markdown_table(heads, rows)}"


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f}"


def _percent(found: Interval | None) -> str:
    return "–" if found is None else f"[{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def _p(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
