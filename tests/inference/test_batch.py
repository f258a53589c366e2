"""A file of questions: reading, concurrent answering, ordered output."""

import asyncio
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from search_r1.inference.batch import (
    BatchQuestion,
    _open_output,
    answer_all,
    check_rows,
    read_questions,
)
from search_r1.inference.dialogue import AgentSession
from tests.fakes import ByteTokenizer, ScriptedEngine
from tests.inference.scripted import SHORT, session
from verl.errors import DataError
from verl.types import Completion, Sampling


class ReversingEngine(ScriptedEngine):
    """Answers earlier questions later, and records the maximum concurrency."""

    running = max_running = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        text = ByteTokenizer().decode(prompt_ids)
        number = int(text[text.index("thing ") + 6])
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        for _ in range(10 - number):
            await asyncio.sleep(0)
        self.running -= 1
        return await ScriptedEngine([f"<answer> {number} </answer>"]).generate(prompt_ids, sampling)


def answers(questions: list[BatchQuestion], who: AgentSession) -> tuple[int, list[dict[str, Any]]]:
    out = io.StringIO()
    num_failed = asyncio.run(answer_all(questions, who, out))
    return num_failed, [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("at_once", [1, 3])
def test_answers_come_in_the_order_of_questions(at_once: int) -> None:
    """Output is in order although later answers are ready first; concurrency is limited."""
    engine = ReversingEngine([])
    questions = [BatchQuestion(f"q#{n}", f"What is thing {n}?") for n in range(6)]
    num_failed, lines = answers(questions, replace(session(engine), num_at_once=at_once))
    assert num_failed == 0
    assert [(line["uid"], line["answer"]) for line in lines] == [
        (f"q#{n}", str(n)) for n in range(6)
    ]
    assert engine.max_running == at_once


def test_a_question_that_cannot_be_asked_fails_alone() -> None:
    """A question that cannot be asked gets a failed line with the reason."""
    questions = [BatchQuestion("q#0", "thing 0 " * 99), BatchQuestion("q#1", "thing 1?")]
    num_failed, lines = answers(questions, session(ReversingEngine([]), limit=400))
    assert num_failed == 1
    assert [line["status"] for line in lines] == ["failed", "answered"]
    assert "at most 400" in lines[0]["error"]


def test_rows_are_asked_as_they_stand(tmp_path: Path) -> None:
    """A row's prompt is used as it is, and the question is extracted from it."""
    file = tmp_path / "rows.jsonl"
    row = {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": SHORT.user_prompt("What is thing 4?")}],
        "reward_model": {"ground_truth": {"target": ["4"]}},
    }
    file.write_text(json.dumps(row) + "\n")
    questions = read_questions(str(file))
    assert [(q.uid, q.question) for q in questions] == [("rows.jsonl#0", "What is thing 4?")]
    engine = ScriptedEngine(["<answer> 4 </answer>"])
    _, (line,) = answers(questions, session(engine))
    assert line["answer"] == "4"
    asked = ByteTokenizer().decode(engine.requests[0].prompt_ids)
    assert asked.count("What is thing 4?") == 1


def test_rows_with_other_tags_are_refused() -> None:
    """As by a run; plain questions are worded by the agent, and too long rows fail alone."""
    who = session(ScriptedEngine([]), limit=400)
    text = "Search with <tool_call> query </tool_call>. Question: Who?"
    fine = [BatchQuestion("q#0", text), BatchQuestion("q#1", "Who?", SHORT.user_prompt("Who?")),
            BatchQuestion("q#2", "Who?", f"{text} {'long ' * 99}")]  # fmt: skip
    check_rows(fine, who)
    other = BatchQuestion("q#3", "Who?", ({"role": "user", "content": text},))
    with pytest.raises(DataError, match=r"q#3: got .*<tool_call>.* fix: set template"):
        check_rows([*fine, other], who)


def test_a_text_file_has_a_question_a_line(tmp_path: Path) -> None:
    """Empty lines are skipped but count in the numbering."""
    file = tmp_path / "questions.txt"
    file.write_text("Who?\n\n  Where? \n")
    assert read_questions(str(file)) == [
        BatchQuestion("questions.txt#0", "Who?"),
        BatchQuestion("questions.txt#2", "Where?"),
    ]


@pytest.mark.parametrize("content", [None, b"\n \n", b"\xff\xfe"])
def test_a_file_without_questions_is_refused(tmp_path: Path, content: bytes | None) -> None:
    """Missing files, empty files and files that are not text are refused."""
    file = tmp_path / "questions.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=r"--file .*fix:"):
        read_questions(str(file))


@pytest.mark.parametrize("name", [None, "answers.jsonl"])
def test_output_that_cannot_be_written(tmp_path: Path, name: str | None) -> None:
    """A closed pipe is raised as it is, and an unwritable file as an error of `--out`."""
    problem = BrokenPipeError("closed")
    expected = (BrokenPipeError, "closed") if name is None else (DataError, "--out .*: got closed")
    with (
        pytest.raises(expected[0], match=expected[1]),
        _open_output(tmp_path / name if name else None),
    ):
        raise ExceptionGroup("of a task group", [problem])
