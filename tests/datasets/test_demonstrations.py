"""`search-r1 data demonstrations`: right dialogues of evaluations become training rows."""

import asyncio
import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from search_r1.datasets.command import build
from search_r1.datasets.demonstrations import RightDialogue, demonstration
from search_r1.evaluation.samples import FAILED, Sample
from search_r1.evaluation.shown_tools import ENTRY
from search_r1.evaluation.store import Store
from tests.core.agent.chat_templates import ChatTokenizer
from tests.datasets.collection import write_jsonl
from tests.evaluation.scripted import Reader, finder, row, runner, sample, search, tasks
from tests.evaluation.test_tables import MANIFEST
from tests.fakes import ByteTokenizer
from verl.agent.native import NativeFormat
from verl.data.prompts import render
from verl.data.rows import Row
from verl.ext.sft.demonstrations import load_demonstrations

ROWS = [row(number) for number in range(4)]
SAID = (
    ("policy", "<search> q </search>"),
    ("observation", "<information>d</information>"),
    ("policy", "<answer> x </answer>"),
)


def searched(question: int) -> tuple[tuple[str, str], ...]:
    """Return the dialogue of a question, with the prompt of its row."""
    return (("prompt", f"user: {ROWS[question].prompt[0]['content']}"), *SAID)  # type: ignore[index]


def questions(folder: Path) -> str:
    """Write the file of the rows."""
    records = [
        {"prompt": [*each.prompt], "data_source": each.data_source,
         "question": f"What is thing {i}?",
         "reward_model": {"ground_truth": {"target": list(each.ground_truth)}}}
        for i, each in enumerate(ROWS)
    ]  # fmt: skip
    return str(write_jsonl(folder / "rows.jsonl", records))


def evaluation(folder: Path, samples: list[Sample], n: int = 1, **changes: Any) -> str:
    """Write a finished evaluation."""
    manifest = copy.deepcopy(MANIFEST) | changes
    manifest["data"]["num_rows"], manifest["decoding"]["n"] = len(samples) // n, n
    with Store(folder, manifest) as store:
        for each in samples:
            store.append(each)
    return str(folder)


def demonstrations(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    """Run the command on the file of the rows; return what it wrote."""
    out = tmp_path / "sft.jsonl"
    assert build("demonstrations", [questions(tmp_path), "--out", str(out), *options]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_supervised_training_sees_what_the_model_wrote_and_read(tmp_path: Path) -> None:
    """Prompt, tokens and masks of a right dialogue are those of its rollout; a wrong one is out."""
    play: Any = runner(finder(ROWS[:3]))  # nothing is found for the last question
    samples = [asyncio.run(play.run(task, Reader())) for task in tasks(ROWS)]
    folder = evaluation(tmp_path / "one", samples)
    assert len(demonstrations(tmp_path, "--evaluations", folder)) == 3
    tokenizer: Any = ByteTokenizer()
    trained_on = load_demonstrations(str(tmp_path / "sft.jsonl"), tokenizer, 10_000)
    for asked, trained, played in zip(ROWS, trained_on, samples, strict=False):
        prompt, *parts = trained.segments
        assert prompt.ids == render(asked, tokenizer).ids
        texts = [(part.origin.name.lower(), tokenizer.decode(list(part.ids))) for part in parts]
        assert texts == [*played.dialogue[1:]]


def test_the_tools_of_a_chat_template_are_in_the_prompt(tmp_path: Path) -> None:
    """A native dialogue is trained on under the prompt of its rollout; the manifest has the tools.

    Without an entry they are the default ones. A tag dialogue has no `tools`.
    """
    tokenizer: Any = ChatTokenizer()
    plain: Any = runner(finder(ROWS))
    format = NativeFormat(tokenizer, plain.agent.environment.tools)
    agent = replace(plain.agent, tokenizer=tokenizer, format=format)
    asked = replace(plain, agent=agent, tokenizer=tokenizer).prompt(ROWS[0])
    assert '"name": "search"' in asked.text
    right = sample(em=1.0, question="What is thing 0?",
                   dialogue=(("prompt", asked.text), *SAID))  # fmt: skip
    schemas = format.schemas
    other = [{**schemas[0], "function": {**schemas[0]["function"], "name": "look_up"}}]
    for number, (entry, tools) in enumerate([({}, schemas), ({ENTRY: json.dumps(other)}, other)]):
        changes: Any = {"template": {"name": "native", "sha256": "t"}, **entry}
        folder = evaluation(tmp_path / str(number), [right], **changes)
        (line,) = demonstrations(tmp_path, "--evaluations", folder)
        assert json.loads(line["tools"]) == tools
        (trained,) = load_demonstrations(str(tmp_path / "sft.jsonl"), tokenizer, 10_000)
        assert trained.segments[0].ids == render(ROWS[0], tokenizer, tools).ids
        assert (trained.segments[0].ids == asked.ids) is (tools == schemas)
    folder = evaluation(tmp_path / "tags", [right])
    (line,) = demonstrations(tmp_path, "--evaluations", folder)
    assert list(line) == ["prompt", "segments"]


@pytest.mark.parametrize("changed", ["Things < |end|> ﬁne?", "Things <|end|>  fine? /no_think"])
def test_what_rendering_changes_is_no_other_prompt(changed: str) -> None:
    """Broken up control tokens, compatibility forms, white space and switches do not count."""
    asked = Row("rows.jsonl", 0, ({"role": "user", "content": changed},), "nq", ("x",))
    right = sample(dialogue=(("prompt", "user\nThings <|end|> fine?\nassistant"), *SAID))
    line = demonstration(asked, RightDialogue(right, ()))
    assert [part["origin"] for part in line["segments"]] == [origin for origin, _ in SAID]


def several(question: int, **more: Any) -> list[Sample]:
    """Return four different right dialogues of a question."""
    return [
        sample(f"rows.jsonl#{question}", 1.0, number=number, question=f"What is thing {question}?",
               dialogue=(*searched(question)[:-1], ("policy", f"<answer> {number} </answer>")),
               **more)
        for number in range(4)
    ]  # fmt: skip


def test_at_most_so_many_of_a_question_are_kept(tmp_path: Path) -> None:
    """The choice depends on the seed alone, and every dialogue can be chosen."""
    folder = evaluation(tmp_path / "one", several(0) + several(1), n=4)
    chosen = set()
    for seed in range(20):
        options = ["--evaluations", folder, "--seed", str(seed)]
        rows = demonstrations(tmp_path, *options)
        assert rows == demonstrations(tmp_path, *options)
        assert [each["prompt"] for each in rows] == [list(each.prompt) for each in ROWS[:2]]
        chosen.add(rows[0]["segments"][-1]["text"])
    assert len(chosen) == 4
    assert len(demonstrations(tmp_path, "--evaluations", folder, "--per-question", "3")) == 6


@pytest.mark.parametrize(
    "change",
    [{"status": FAILED}, {"status": "out_of_turns"}, {"em": 0.0}, {"truncated_turns": 1},
     {"invalid_actions": 1}, {"dialogue": (*searched(1), ("prompt", "again"))},
     {"dialogue": searched(1)[:1]}],
    ids=["failed", "no answer", "wrong", "cut off", "no action", "two prompts", "nothing written"],
)  # fmt: skip
def test_other_dialogues_are_left_out(tmp_path: Path, change: dict[str, Any]) -> None:
    """Only a whole right dialogue is a demonstration."""
    good = sample("rows.jsonl#0", 1.0, dialogue=searched(0), searches=(search("q"),))
    bad = sample(**{"uid": "rows.jsonl#1", "em": 1.0, "question": "What is thing 1?",
                    "dialogue": searched(1), **change})  # fmt: skip
    folder = evaluation(tmp_path / "one", [good, bad])
    (row,) = demonstrations(tmp_path, "--evaluations", folder)
    assert row["prompt"] == list(ROWS[0].prompt)


def test_the_measure_decides(tmp_path: Path) -> None:
    """Another measure may accept what is not exactly right; equal dialogues count once."""
    samples = [
        sample(f"rows.jsonl#{i}", f1=0.5, judge=judge, dialogue=searched(i),
               question=f"What is thing {i}?")
        for i, judge in enumerate([1.0, None])
    ]  # fmt: skip
    folders = [evaluation(tmp_path / name, samples) for name in ("one", "two")]
    options = ["--evaluations", *folders, "--per-question", "4"]
    assert len(demonstrations(tmp_path, *options, "--measure", "f1", "--min-score", "0.5")) == 2
    assert len(demonstrations(tmp_path, *options, "--measure", "judge")) == 1


@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("none", "--evaluations"),
        ("wrong", "--evaluations"),
        ("rag", "rag"),
        ("bound", "--min-score"),
        ("other prompts", "rows.jsonl#0"),
    ],
)
def test_what_gives_no_demonstration_is_refused(
    tmp_path: Path, case: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written, and the message names what is missing."""
    changes: dict[str, Any] = {"method": "rag"} if case == "rag" else {}
    em = 0.0 if case == "wrong" else 1.0
    dialogue = searched(1 if case == "other prompts" else 0)
    right = sample(em=em, dialogue=dialogue, question="What is thing 0?")
    folder = evaluation(tmp_path / "one", [right], **changes)
    options = [] if case == "none" else ["--evaluations", folder]
    options += ["--min-score", "2"] if case == "bound" else []
    out = tmp_path / "sft.jsonl"
    arguments = [questions(tmp_path), "--out", str(out), *options]
    try:
        status: Any = build("demonstrations", arguments)
    except SystemExit as end:
        status = end.code
    assert (status, out.exists()) == (2, False)
    assert part in capsys.readouterr().err.replace("_", "-")
