"""Reports of evaluations: `metrics.json` and `report.md` of one, comparison tables of several.

Comparisons first check that the evaluations used the same questions and one corpus.
"""

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from statistics import fmean
from typing import Any

from search_r1.evaluation import published, shown_tools
from search_r1.evaluation.measures import num_judged_differently, titles
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
    by_set,
    compare,
    summarize,
)
from search_r1.inference.retriever_facts import CONTROLS
from search_r1.plain import markdown_table
from search_r1.rewards.normalize import RULES
from verl.errors import ConfigError, explain
from verl.files import atomic_write

logger = logging.getLogger(__name__)

COSTS = ("searches", "turns", "tokens", "policy_tokens", "seconds", "searches_per_correct",
         "tokens_per_correct")  # fmt: skip
"""Measures of what a question costs, which a table shows beside the chosen one."""
COUNTS = (*COSTS, "observation_tokens")
"""Measures that are shown as numbers; all others are shares, shown in per cent."""


def write_report(
    folder: Path, pass_k: Sequence[int] = (), num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> Summary:
    """Write `metrics.json` and `report.md` of a finished evaluation into its folder.

    Raises DataError for an unfinished evaluation, ConfigError for a k above its number of samples.
    """
    manifest, samples = read_evaluation(folder)
    n = manifest["decoding"]["n"]
    if max(pass_k, default=0) > n:
        fix = f"leave out those above {n}, or evaluate with --n {max(pass_k)}"
        raise ConfigError(explain("--pass-k", pass_k, f"1 to n={n} of {folder}", fix))
    failed = [sample for sample in samples if sample.status == FAILED]
    if failed:
        logger.warning("%d of %d dialogues failed (%s) and count as wrong; start the same "
                       "evaluation again to repeat them", len(failed), len(samples),
                       failed[0].error)  # fmt: skip
    summary = summarize(samples, pass_k, num_resamples=num_resamples, seed=seed)
    differing = num_judged_differently(samples)
    metrics = json.dumps(asdict(summary) | {"judged_differently": differing}, indent=1) + "\n"
    report = f"{as_markdown(manifest, summary, pass_k)}\n{_rules_note(manifest, differing)}\n"
    for name, text in ((METRICS, metrics), (REPORT, report)):
        with atomic_write(folder / name) as part:
            part.write_text(text, encoding="utf-8")
    return summary


def _rules_note(manifest: Manifest, differing: int) -> str:
    """Say by which rule answers were compared, and how many rows another one judges differently."""
    rule = rule_name(manifest)
    others = " or ".join(name for name in RULES if name != rule)
    num_rows = manifest["data"]["num_rows"]
    return (
        f"Answers are compared by normalize={rule}; {differing} of {num_rows} rows have an answer "
        f"whose EM is another with normalize={others}."
    )


def rule_name(manifest: Manifest) -> str:
    """Return the rule by which an evaluation compared answers; older ones had only the first."""
    return str(manifest["decoding"].get("normalize", next(iter(RULES))))


def as_markdown(manifest: Manifest, summary: Summary, pass_k: Sequence[int] = ()) -> str:
    """Format the report: what was evaluated, then a row per measure and a column per set."""
    columns = list(summary.estimates)
    if len(columns) == 3:  # one set, whose values the two averages would repeat
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
    """Describe model, data, retriever, template and decoding in a few lines."""
    lines = [
        f"model: {model_name(manifest)}",
        f"data: {', '.join(f'{n} ({h[:12]})' for n, h in manifest['data']['files'].items())}",
        f"retriever: {retriever_name(manifest)}",
        f"method: {manifest['method']}, template {manifest['template']['name']}",
        f"decoding: {decoding_name(manifest)}",
    ]
    return "\n".join(f"- {line}" for line in lines)


def model_name(manifest: Manifest) -> str:
    """Return the model's name with its hash, or the endpoint that served it."""
    model = manifest["model"]
    if "endpoint" in model:
        return f"{model['served_model'] or model['name']} at {model['endpoint']}"
    return f"{model['name']} ({model['sha256'][:12]})"


def retriever_name(manifest: Manifest) -> str:
    """Return the retriever's backend and corpus as a phrase."""
    facts = manifest["retriever"]
    corpus = facts.get("corpus")
    return str(facts["retriever"]) + (f" over {corpus_name(corpus)}" if corpus else "")


def decoding_name(manifest: Manifest) -> str:
    """Return the sampling parameters and the limits of a dialogue as a phrase."""
    facts = manifest["decoding"]
    sampling = f"temperature {facts['temperature']}, {facts['n']} samples"
    if facts["temperature"] == 0:
        sampling = "greedy"
    reading = ", untagged replies read" if facts.get("untagged") == READ else ""
    rule = rule_name(manifest)
    reading += "" if rule == next(iter(RULES)) else f", normalize {rule}"
    return f"{sampling}, max_turns {facts['max_turns']}, topk {facts['topk']}{reading}"


def corpus_name(corpus: Any) -> str:
    if isinstance(corpus, dict) and {"count", "digest"} <= corpus.keys():
        return f"{corpus['count']} documents ({corpus['digest']})"
    return str(corpus)


def cell(name: str, estimate: Estimate) -> str:
    """Format a value with its interval, shares in per cent; a dash if it is undefined."""
    if estimate.value is None:
        return "–"
    text = _number(name, estimate.value)
    return text if estimate.interval is None else f"{text} {_interval(name, estimate.interval)}"


def _number(name: str, value: float, sign: str = "") -> str:
    """Format a measure's value, shares in per cent; a dash if it is undefined."""
    scale, digits = (1, 2) if name in COUNTS else (100, 1)
    return f"{value * scale:{sign}.{digits}f}" if math.isfinite(value) else "–"


def _interval(name: str, interval: Interval | None, sign: str = "") -> str:
    if interval is None:
        return "–"
    return f"[{_number(name, interval.low, sign)}, {_number(name, interval.high, sign)}]"


NAMED_IN_LEGEND = ("model", "data", "retriever", "method", shown_tools.ENTRY)
"""Parts of a manifest that every table names, that must be equal, or are in the template's hash."""
WITHOUT_DOCUMENTS = ("empty", "random")
"""Control retrievers with which search utility is compared."""


@dataclass(frozen=True)
class FinishedEvaluation:
    """A finished evaluation with its manifest and samples."""

    name: str
    manifest: Manifest
    samples: Sequence[Sample]

    @property
    def questions(self) -> set[tuple[str, str]]:
        """The rows that were asked, with their questions."""
        return {(sample.uid, sample.question) for sample in self.samples}

    @property
    def retriever(self) -> str:
        return str(self.manifest["retriever"]["retriever"])

    @property
    def corpus(self) -> str | None:
        """The corpus that was searched; None for control retrievers and methods without search."""
        if self.retriever in CONTROLS:
            return None
        return corpus_name(self.manifest["retriever"].get("corpus", retriever_name(self.manifest)))


def read_all(folders: Sequence[Path], *, is_mixed: bool = False) -> list[FinishedEvaluation]:
    """Read evaluations; they are named after their folders, or by path if folder names collide.

    Raises DataError for a folder without a finished evaluation, and, unless `is_mixed`, ConfigError
    for evaluations of different rows (other file contents or another choice of rows), rules of
    normalisation, or corpora.
    """
    names = [folder.name for folder in folders]
    evaluations = [
        FinishedEvaluation(n if names.count(n) == 1 else str(folder), *read_evaluation(folder))
        for n, folder in zip(names, folders, strict=True)
    ]
    if is_mixed:
        return evaluations
    first = evaluations[0]
    for other in evaluations[1:]:
        changes = differences(first.manifest["data"], other.manifest["data"], "data")
        if not changes and first.questions != other.questions:
            changes = ["other rows of these files"]
        if changes:
            got = f"{first.name} and {other.name} differ: {'; '.join(changes[:3])}"
            fix = "evaluate both on the same files and rows, or add --mixed"
            raise ConfigError(explain("data", got, "the same questions", fix))
    rules = {rule_name(e.manifest): e.name for e in evaluations}
    if len(rules) > 1:
        got = "; ".join(f"{name}: {rule}" for rule, name in rules.items())
        fix = "evaluate all of them with one --normalize, or add --mixed"
        raise ConfigError(explain("--normalize", got, "one rule", fix))
    corpora = {e.corpus: e.name for e in evaluations if e.corpus is not None}
    if len(corpora) > 1:
        got = "; ".join(f"{name}: {corpus}" for corpus, name in corpora.items())
        fix = "search one corpus in all of them, or add --mixed (the table names each)"
        raise ConfigError(explain("corpus", got, "one corpus", fix))
    return evaluations


def table(
    evaluations: Sequence[FinishedEvaluation],
    measure: str = "em",
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
    paper: str | None = None,
) -> str:
    """Format settings, the measure by set, and search utility.

    `paper` is a size of the published models, whose table is put before the evaluations' EM.
    """
    summaries = {
        e.name: summarize(e.samples, num_resamples=num_resamples, seed=seed) for e in evaluations
    }
    parts = [_legend(evaluations), _measure_table(summaries, measure),
             f"Costs of a question, over all rows:\n\n{_cost_table(summaries)}"]  # fmt: skip
    utilities = _utilities(evaluations, num_resamples, seed)
    if utilities:
        parts.append(f"Search utility (EM with documents − EM without):\n\n{utilities}")
    if paper is not None:
        parts.append(f"{published.NOTE}:\n\n{_beside_the_paper(evaluations, paper)}")
    return "\n".join(parts)


def _legend(evaluations: Sequence[FinishedEvaluation]) -> str:
    heads = ["evaluation", "model", "method", "retriever and corpus", "template", "decoding"]
    first = evaluations[0]
    rows = [
        [e.name, model_name(e.manifest), e.manifest["method"], retriever_name(e.manifest),
         e.manifest["template"]["name"], decoding_name(e.manifest)]
        for e in evaluations
    ]  # fmt: skip
    return markdown_table(heads, rows) + "".join(map(_also_differs, evaluations[1:], repeat(first)))


def _also_differs(evaluation: FinishedEvaluation, first: FinishedEvaluation) -> str:
    """Name what a difference may also be due to: other lengths, wording, versions."""
    old, new = (
        {name: value for name, value in e.manifest.items() if name not in NAMED_IN_LEGEND}
        for e in (first, evaluation)
    )
    changes = "; ".join(differences(old, new)).replace(", now ", " against ")
    return f"\n{first.name} and {evaluation.name} also differ in {changes}\n" if changes else ""


def _measure_table(summaries: Mapping[str, Summary], measure: str) -> str:
    sets = sorted({name for s in summaries.values() for name in s.estimates} - {MACRO, ROWS})
    columns = [*sets, MACRO, ROWS] if len(sets) > 1 else sets
    rows = [
        [name, *(cell(measure, summary.estimates[c][measure]) if c in summary.estimates else "–"
                 for c in columns)]
        for name, summary in summaries.items()
    ]  # fmt: skip
    return markdown_table([measure, *columns], rows)


def _cost_table(summaries: Mapping[str, Summary]) -> str:
    """Format EM and costs over all rows; a dash where an evaluation did not measure them."""
    heads, values = titles(), {name: s.estimates[ROWS] for name, s in summaries.items()}
    rows = [
        [name, *(_number(m, math.nan if (v := of[m].value) is None else v) for m in ("em", *COSTS))]
        for name, of in values.items()
    ]
    return markdown_table(["", heads["em"], *(heads[name] for name in COSTS)], rows)


def _beside_the_paper(evaluations: Sequence[FinishedEvaluation], size: str) -> str:
    """Format the paper's rows, each followed by evaluations of its method; EM as fractions.

    The average needs every set of the paper. A line below names evaluations without any of them.
    """
    names = list(published.SETS)
    own = dict[str, tuple[float, ...]]()
    below: dict[str, list[str]] = {name: [name] for name in published.EXACT_MATCH[size]}
    for evaluation in evaluations:
        ems = {name: [s.em for s in evaluation.samples if s.data_source == name] for name in names}
        values = [fmean(ems[name]) if ems[name] else math.nan for name in names]
        own[f"**{evaluation.name}**"] = (*values, fmean(values))
        below[_published_row(evaluation, list(below))].append(f"**{evaluation.name}**")
    rows = published.EXACT_MATCH[size] | own
    cells = [
        [name, *(f"{value:.3f}" if math.isfinite(value) else "–" for value in rows[name])]
        for group in below.values() for name in group
    ]  # fmt: skip
    notes = [
        f"\n{e.name} has questions of {', '.join(by_set(e.samples))} and of none of the paper's "
        f"sets; their `data_source` is {', '.join(names)}.\n"
        for e in evaluations
        if not any(s.data_source in names for s in e.samples)
    ]
    return markdown_table(["EM", *published.SETS.values(), "Avg."], cells) + "".join(notes)


def _published_row(evaluation: FinishedEvaluation, rows: Sequence[str]) -> str:
    """Return the row that the folder is named after, as `sft`, or else that of the method."""
    by_name = {re.sub(r"[ -]", "_", row.lower().replace(",", "")): row for row in rows}
    own = re.sub(r"[ -]", "_", Path(evaluation.name).name.lower())
    return by_name.get(own) or published.ROW_OF[evaluation.manifest["method"]]


def _utilities(evaluations: Sequence[FinishedEvaluation], num_resamples: int, seed: int) -> str:
    """Format a row per pair that differs only in the retriever: a real one and a control."""
    pairs = [
        (real, control)
        for real in evaluations
        for control in evaluations
        if real.corpus is not None
        and control.retriever in WITHOUT_DOCUMENTS
        and _without_retriever(real.manifest) == _without_retriever(control.manifest)
    ]
    rows = [
        [f"{real.name} − {control.name}", d.where, _number("em", d.difference, "+"),
         _interval("em", d.interval, "+"), _p(d.p_bootstrap)]
        for real, control in pairs
        for d in compare(real.samples, control.samples, num_resamples=num_resamples, seed=seed)
    ]  # fmt: skip
    heads = ["pair", "set", "difference", "95 % interval", "p (bootstrap)"]
    return markdown_table(heads, rows) if rows else ""


def _without_retriever(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in manifest.items() if name != "retriever"}


def comparison_table(
    first: FinishedEvaluation,
    second: FinishedEvaluation,
    differences: Sequence[Difference],
    measure: str,
) -> str:
    """Format the settings of two evaluations and their paired differences."""
    heads = ["set", "questions", first.name, second.name, "difference", "95 % interval",
             "p (bootstrap)", "only first", "only second", "p (McNemar)"]  # fmt: skip
    rows = [
        [d.where, str(d.num_questions), _number(measure, d.first), _number(measure, d.second),
         _number(measure, d.difference, "+"), _interval(measure, d.interval, "+"),
         _p(d.p_bootstrap), *("–" if n is None else str(n) for n in (d.only_first, d.only_second)),
         _p(d.p_mcnemar)]
        for d in differences
    ]  # fmt: skip
    unit = "" if measure in COUNTS else ", in points"
    title = f"{measure}, first minus second{unit}"
    return f"{_legend([first, second])}\n{title}:\n\n{markdown_table(heads, rows)}"


def _p(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
