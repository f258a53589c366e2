"""Evaluations for people: `metrics.json` and `report.md` of one, tables of several.

Of several, the questions of equality are asked first.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_r1.evaluation.measures import titles
from search_r1.evaluation.options import READ
from search_r1.evaluation.samples import FAILED, Sample
from search_r1.evaluation.store import METRICS, REPORT, Manifest, differences, read_evaluation
from search_r1.evaluation.summary import (
    MACRO,
    NUM_RESAMPLES,
    ROWS,
    Difference,
    Estimate,
    Interval,
    Summary,
    compare,
    summarize,
)
from search_r1.inference.opening import CONTROLS
from verl.errors import ConfigError, explain
from verl.files import atomic_write

logger = logging.getLogger(__name__)

COUNTS = ("searches", "turns", "policy_tokens", "observation_tokens", "searches_per_correct",
          "tokens_per_correct")  # fmt: skip
"""Measures that are shown as they are; all others are shares and shown in per cent."""


def write_report(
    folder: Path,
    pass_k: Sequence[int] = (),
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Summary:
    """Sum up a finished evaluation into its folder.

    Raises DataError for an unfinished one, ConfigError for a k of which it has too few samples.
    """
    manifest, samples = read_evaluation(folder)
    most = manifest["decoding"]["n"]
    if max(pass_k, default=0) > most:
        fix = f"leave those above {most} out, or evaluate with --n {max(pass_k)}"
        raise ConfigError(explain("--pass-k", pass_k, f"1 to n={most} of {folder}", fix))
    failed = [sample for sample in samples if sample.status == FAILED]
    if failed:
        logger.warning("%d of %d dialogues failed (%s) and count as wrong; start the same "
                       "evaluation again to play them anew", len(failed), len(samples),
                       failed[0].error)  # fmt: skip
    summary = summarize(samples, pass_k, num_resamples=num_resamples, seed=seed)
    metrics = json.dumps(summary.to_json(), indent=1) + "\n"
    for name, text in ((METRICS, metrics), (REPORT, as_markdown(manifest, summary, pass_k))):
        with atomic_write(folder / name) as part:
            part.write_text(text, encoding="utf-8")
    return summary


def as_markdown(manifest: Manifest, summary: Summary, pass_k: Sequence[int] = ()) -> str:
    """What was evaluated, then a row for each measure and a column for each set."""
    columns = list(summary.estimates)
    if len(columns) == 3:  # one set: both averages are its own figures
        columns = columns[:1]
    counts = summary.num_questions
    heads = [f"{name} ({counts[name]})" if name in counts else name for name in columns]
    rows = [
        [title, *(cell(name, summary.estimates[column][name]) for column in columns)]
        for name, title in titles(pass_k).items()
        if any(summary.estimates[column][name].value is not None for column in columns)
    ]
    return f"{describe(manifest)}\n\n{markdown_table(['', *heads], rows)}"


def describe(manifest: Manifest) -> str:
    """Model, data, retriever, wording and decoding in a few lines."""
    lines = [
        f"model: {model_name(manifest)}",
        f"data: {', '.join(f'{n} ({h[:12]})' for n, h in manifest['data']['files'].items())}",
        f"retriever: {retriever_name(manifest)}",
        f"method: {manifest['method']}, template {manifest['template']['name']}",
        f"decoding: {decoding_name(manifest)}",
    ]
    return "\n".join(f"- {line}" for line in lines)


def model_name(manifest: Manifest) -> str:
    """The model's name with its hash, or the endpoint that served it."""
    model = manifest["model"]
    if "endpoint" in model:
        return f"{model['served_model'] or model['name']} at {model['endpoint']}"
    return f"{model['name']} ({model['sha256'][:12]})"


def retriever_name(manifest: Manifest) -> str:
    """Engine and corpus as a phrase."""
    facts = manifest["retriever"]
    corpus = facts.get("corpus")
    return str(facts["retriever"]) + (f" over {corpus_name(corpus)}" if corpus else "")


def decoding_name(manifest: Manifest) -> str:
    """How it was sampled, and what a dialogue might do."""
    facts = manifest["decoding"]
    greedy = facts["temperature"] == 0
    how = "greedy" if greedy else f"temperature {facts['temperature']}, {facts['n']} samples"
    reading = ", untagged replies read" if facts.get("untagged") == READ else ""
    return f"{how}, max_turns {facts['max_turns']}, topk {facts['topk']}{reading}"


def corpus_name(corpus: Any) -> str:
    if isinstance(corpus, dict) and {"count", "digest"} <= corpus.keys():
        return f"{corpus['count']} documents ({corpus['digest']})"
    return str(corpus)


def cell(name: str, estimate: Estimate) -> str:
    """A figure with its interval, in per cent where it is a share; a dash where undefined."""
    if estimate.value is None:
        return "–"
    text = _figure(name, estimate.value)
    return text if estimate.interval is None else f"{text} {_bounds(name, estimate.interval)}"


def _figure(name: str, value: float, sign: str = "") -> str:
    """A measure's value, in per cent where it is a share; a dash where undefined."""
    scale, digits = (1, 2) if name in COUNTS else (100, 1)
    return f"{value * scale:{sign}.{digits}f}" if math.isfinite(value) else "–"


def _bounds(name: str, found: Interval | None, sign: str = "") -> str:
    if found is None:
        return "–"
    return f"[{_figure(name, found.low, sign)}, {_figure(name, found.high, sign)}]"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; bars within cells are escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    escaped = ([text.replace("|", "\\|") for text in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped) + "\n"


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
    if is_mixed:
        return found
    first = found[0]
    for other in found[1:]:
        changes = differences(first.manifest["data"], other.manifest["data"], "data")
        if changes:
            got = f"{first.name} and {other.name} differ: {'; '.join(changes[:3])}"
            fix = "evaluate both on the same files and rows, or say --mixed"
            raise ConfigError(explain("data", got, "the same questions", fix))
    corpora = {e.corpus: e.name for e in found if e.corpus is not None}
    if len(corpora) > 1:
        got = "; ".join(f"{name}: {corpus}" for corpus, name in corpora.items())
        fix = "search one corpus in all of them, or say --mixed (the table names each)"
        raise ConfigError(explain("corpus", got, "one corpus", fix))
    return found


def table(
    folders: Sequence[Path],
    measure: str = "em",
    *,
    is_mixed: bool = False,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> str:
    """What each evaluation is, its measure by set, what searching brings. Raises ConfigError."""
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
        [f"{real.name} − {control.name}", d.where, _figure("em", d.difference, "+"),
         _bounds("em", d.interval, "+"), _p(d.p_bootstrap)]
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
        [d.where, str(d.num_questions), _figure(measure, d.first), _figure(measure, d.second),
         _figure(measure, d.difference, "+"), _bounds(measure, d.interval, "+"), _p(d.p_bootstrap),
         *("–" if n is None else str(n) for n in (d.only_first, d.only_second)), _p(d.p_mcnemar)]
        for d in found
    ]  # fmt: skip
    unit = "" if measure in COUNTS else ", in points"
    what = f"{measure}, first minus second{unit}"
    return f"{_legend([first, second])}\n{what}:\n\n{markdown_table(heads, rows)}"


def _p(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
