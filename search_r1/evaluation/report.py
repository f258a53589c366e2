"""One evaluation for people: `metrics.json`, and `report.md` with a table of every measure."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from search_r1.evaluation.intervals import NUM_RESAMPLES
from search_r1.evaluation.measures import titles
from search_r1.evaluation.options import READ
from search_r1.evaluation.samples import FAILED
from search_r1.evaluation.store import METRICS, REPORT, Manifest, read_evaluation
from search_r1.evaluation.summary import Estimate, Summary, summarize
from verl.files import whole_file

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
    """Sum up a finished evaluation into its folder. Raises DataError for an unfinished one."""
    manifest, samples = read_evaluation(folder)
    failed = [sample for sample in samples if sample.status == FAILED]
    if failed:
        logger.warning("%d of %d dialogues failed (%s) and count as wrong; start the same "
                       "evaluation again to play them anew", len(failed), len(samples),
                       failed[0].error)  # fmt: skip
    summary = summarize(samples, pass_k, num_resamples=num_resamples, seed=seed)
    metrics = json.dumps(summary.to_json(), indent=1) + "\n"
    for name, text in ((METRICS, metrics), (REPORT, as_markdown(manifest, summary, pass_k))):
        with whole_file(folder / name) as part:
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
    """A corpus by size and hash."""
    if isinstance(corpus, dict) and {"count", "digest"} <= corpus.keys():
        return f"{corpus['count']} documents ({corpus['digest']})"
    return str(corpus)


def cell(name: str, estimate: Estimate) -> str:
    """A figure with its interval, in per cent where it is a share; a dash where undefined."""
    if estimate.value is None:
        return "–"
    scale, digits = (1, 2) if name in COUNTS else (100, 1)
    text = f"{estimate.value * scale:.{digits}f}"
    if estimate.interval is None:
        return text
    low, high = estimate.interval.low * scale, estimate.interval.high * scale
    return f"{text} [{low:.{digits}f}, {high:.{digits}f}]"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; bars within cells are escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    escaped = ([text.replace("|", "\\|") for text in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped) + "\n"
