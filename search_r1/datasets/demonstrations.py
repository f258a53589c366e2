"""Turns right dialogues of evaluations into demonstrations: `search-r1 data demonstrations`.

The evaluated model may be any: the policy itself (rejection sampling), or a larger one behind an
endpoint. A demonstration has the prompt of the question's row, the tools that the chat template
wrote into it, and what the model wrote and read.
"""

import json
import random
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_r1.agent.question import question_of
from search_r1.datasets.columns import by_set
from search_r1.datasets.command import DemonstrationOptions
from search_r1.evaluation.samples import Sample
from search_r1.evaluation.shown_tools import schemas_of
from search_r1.evaluation.store import Manifest, read_evaluation
from search_r1.plain import markdown_table
from verl.data.rows import Row, load_rows
from verl.data.trajectories import write_jsonl
from verl.errors import ConfigError, DataError, explain
from verl.types import Status

ORIGINS = frozenset({"policy", "observation"})
"""Origins of what follows the prompt in a demonstration."""


@dataclass(frozen=True)
class RightDialogue:
    """A dialogue of an evaluation that may be a demonstration."""

    sample: Sample
    tools: Sequence[Mapping[str, Any]]
    """Schemas that the chat template wrote into its prompt; none for templates with tags."""


Dialogues = Mapping[tuple[str, str], Sequence[RightDialogue]]
"""Dialogues of each question, by set and question."""


def build(options: DemonstrationOptions) -> int:
    """Write the demonstrations, and print how many questions have one.

    Raises ConfigError or DataError if there is nothing to read or to keep.
    """
    for key, value in (("FILE", options.files), ("--evaluations", options.evaluations)):
        if not value:
            raise ConfigError(explain(key, "nothing", "one or more", "name what was evaluated"))
    rows = load_rows([str(path) for path in options.files])
    right, dropped = read_right(options)
    kept = [choose(row, right.get(_key(row), ()), options) for row in rows]
    demonstrations = [
        demonstration(row, dialogue)
        for row, dialogues in zip(rows, kept, strict=True)
        for dialogue in dialogues
    ]
    left_out = f"left out: {', '.join(f'{n} {reason}' for reason, n in dropped.items()) or 'none'}"
    if not demonstrations:
        fix = "lower --min_score, or name the files that were evaluated"
        got = f"none for these questions ({left_out})"
        raise DataError(explain("--evaluations", got, "right dialogues", fix))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(options.out, demonstrations)
    count = f"{options.out}: {len(demonstrations)} demonstrations; {left_out}"
    sys.stdout.write(f"{count}\n\n{table(rows, kept)}")
    return 0


def read_right(options: DemonstrationOptions) -> tuple[Dialogues, Counter[str]]:
    """Return the different right dialogues of all evaluations, and why others are left out.

    Raises DataError for an unfinished evaluation, or one of a baseline.
    """
    right: dict[tuple[str, str], dict[Any, RightDialogue]] = defaultdict(dict)
    dropped = Counter[str]()
    for folder in options.evaluations:
        manifest, samples = _read_agent(folder)
        tools = schemas_of(manifest)
        for sample in samples:
            found = right[sample.data_source, sample.question]
            reason = "twice" if sample.dialogue in found else _reason(sample, options)
            if reason:
                dropped[reason] += 1
            else:
                found[sample.dialogue] = RightDialogue(sample, tools)
    return {key: [*found.values()] for key, found in right.items()}, dropped


def _read_agent(folder: Path) -> tuple[Manifest, Sequence[Sample]]:
    manifest, samples = read_evaluation(folder)
    if (method := manifest.get("method")) != "agent":
        fix = "evaluate with --method agent, or train on those rows with their prompts yourself"
        raise DataError(explain(str(folder), f"method {method}", "dialogues of an agent", fix))
    return manifest, samples


def _reason(sample: Sample, options: DemonstrationOptions) -> str:
    """Return why a dialogue is no demonstration; empty if it is one."""
    score = getattr(sample, options.measure)
    if sample.status != Status.ANSWERED:
        return "not answered"
    if score is None or not score >= options.min_score:
        return f"{options.measure} below {options.min_score:g}"
    if sample.truncated_turns or sample.invalid_actions:
        return "a turn without a valid action"
    origins = [origin for origin, _ in sample.dialogue[1:]]
    return "" if ORIGINS.issuperset(origins) and "policy" in origins else "other parts"


def choose(
    row: Row, dialogues: Sequence[RightDialogue], options: DemonstrationOptions
) -> Sequence[RightDialogue]:
    """Choose at random, by seed and question, at most `per_question` of its right dialogues."""
    order = random.Random(f"{options.seed}/{row.data_source}/{question_of(row)}")
    return order.sample(dialogues, min(options.per_question, len(dialogues)))


def demonstration(row: Row, dialogue: RightDialogue) -> dict[str, Any]:
    """Return a line of the file that `verl.trainer.sft` reads.

    Raises DataError if the dialogue was held with another prompt than the row's.
    """
    asked, *said = dialogue.sample.dialogue
    prompt = row.prompt if isinstance(row.prompt, str) else str(row.prompt[-1]["content"])
    if _bare(prompt) not in _bare(asked[1]):
        got = f"another prompt than that of {row.uid}"
        fix = "name the files that were evaluated, or evaluate these"
        raise DataError(explain(f"dialogue of {dialogue.sample.uid}", got, "the same", fix))
    segments = [{"origin": origin, "text": text} for origin, text in said]
    # As text: a parquet file made of these rows would give each schema the keys of all others.
    tools = {"tools": json.dumps(dialogue.tools)} if dialogue.tools else {}
    return {"prompt": row.prompt, **tools, "segments": segments}


def _bare(text: str) -> str:
    """Return a text without what rendering may change: white space, forms, thinking switches.

    Control tokens of rows are broken up by spaces, some in their compatibility form.
    """
    joined = "".join(unicodedata.normalize("NFKC", text).split())
    return joined.replace("/no_think", "").replace("/think", "")


def _key(row: Row) -> tuple[str, str]:
    return row.data_source, question_of(row)


def table(rows: Sequence[Row], kept: Sequence[Sequence[RightDialogue]]) -> str:
    """Format by set: questions, those with a demonstration, demonstrations and their searches."""
    heads = ["set", "questions", "with one", "demonstrations", "searches in them"]
    lines = []
    for name, numbers in by_set([row.data_source for row in rows]).items():
        chosen = [dialogue.sample for number in numbers for dialogue in kept[number]]
        searches = Counter(len(sample.searches) for sample in chosen)
        shown = ", ".join(f"{count} × {number}" for number, count in sorted(searches.items()))
        counts = [len(numbers), sum(bool(kept[number]) for number in numbers), len(chosen)]
        lines.append([name, *map(str, counts), shown])
    return markdown_table(heads, lines)
