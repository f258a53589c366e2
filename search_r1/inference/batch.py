"""A file of questions: asked many at once, answered line by line in their order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from search_r1.inference.dialogue import AgentSession
from search_r1.inference.questions import question_of
from search_r1.plain import json_line
from verl.data import load_rows
from verl.data.rows import Message
from verl.errors import DataError, UserError, explain
from verl.files import read_text
from verl.types import Status

ROWS = (".parquet", ".jsonl", ".json", ".csv", ".tsv")
"""Ends of names of what is no plain text; of some of them it is only told what to give."""
MOST = 2**28
"""Characters of a text file: some million questions."""


@dataclass(frozen=True)
class BatchQuestion:
    """One question of a file."""

    uid: str
    """`file#row`, rows from 0 (of a text file: lines)."""
    question: str
    messages: str | Sequence[Message] | None = None
    """The prompt as it stands in a row; None for a question that is to be put in our wording."""


def read_questions(file: str) -> list[BatchQuestion]:
    """The questions of a text file, one a line, or of rows in parquet or jsonl.

    Raises DataError for a file that is missing, malformed or empty.
    """
    if Path(file).suffix.lower() in ROWS:
        return [BatchQuestion(row.uid, question_of(row), row.prompt) for row in load_rows(file)]
    found = list(_lines(Path(file)))
    if not found:
        fix = "write one question a line, or give rows as .parquet or .jsonl"
        raise DataError(explain(f"--file {file}", "no question", "questions", fix))
    return found


def _lines(file: Path) -> Iterator[BatchQuestion]:
    try:
        text = read_text(file, MOST)
    except (OSError, ValueError) as error:
        fix = "give a text file in UTF-8, or rows as .parquet or .jsonl"
        raise DataError(explain(f"--file {file}", str(error), "questions", fix)) from error
    for number, line in enumerate(text.split("\n")):
        if line.strip():
            yield BatchQuestion(f"{file.name}#{number}", line.strip())


async def answer_all(questions: Sequence[BatchQuestion], session: AgentSession, out: TextIO) -> int:
    """Write one JSON object a line, in order, each as soon as those before it are there.

    Returns how many dialogues failed; one that fails ends no other.
    """
    places = asyncio.Semaphore(session.num_at_once)
    num_failed = 0
    with tqdm(total=len(questions), desc="ask", unit="question") as bar:

        async def play(asked: BatchQuestion) -> dict[str, Any]:
            async with places:
                line = await _answer(asked, session)
            bar.update()
            return line

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(play(asked)) for asked in questions]
            for task in tasks:
                line = await task
                num_failed += line["status"] == Status.FAILED.value
                out.write(json_line(line))
                out.flush()
    return num_failed


async def _answer(asked: BatchQuestion, session: AgentSession) -> dict[str, Any]:
    """A reply as JSON, or what kept the question from being asked."""
    try:
        prompt = (
            session.prompt(asked.question)
            if asked.messages is None
            else session.render(asked.messages, asked.uid)
        )
        reply = await session.ask(asked.question, prompt)
    except UserError as error:
        failed = {"status": Status.FAILED.value, "error": str(error), "answer": None}
        return {"uid": asked.uid, "question": asked.question, **failed}
    return {"uid": asked.uid, **reply.to_json()}
