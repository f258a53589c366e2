"""What `search-r1 infer` does: one question, a conversation, or a file of questions.

Those of a file are asked many at once, and answered line by line in their order.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from search_r1.infer import QUESTION, InferOptions
from search_r1.inference.dialogue import SILENCE, AgentSession, DialogueListener, Reply, question_of
from search_r1.inference.opening import opened
from search_r1.inference.options import InferenceOptions
from search_r1.inference.terminal import Terminal, converse
from search_r1.plain import json_line, log
from verl.data import load_rows
from verl.data.rows import Message
from verl.errors import DataError, ToolError, UserError, explain
from verl.files import exclusive_lock, read_text
from verl.types import Status

ROWS = (".parquet", ".jsonl", ".json", ".csv", ".tsv")
"""Ends of names of what is no plain text; of some of them it is only told what to give."""
MOST = 2**28
"""Characters of a text file: some million questions."""


@dataclass(frozen=True)
class BatchQuestion:
    uid: str
    """`file#row`, rows from 0 (of a text file: lines)."""
    question: str
    messages: str | Sequence[Message] | None = None
    """The prompt as it stands in a row; None for a question that is to be put in our wording."""


def read_questions(file: str) -> list[BatchQuestion]:
    """The questions of a text file, one a line, or of rows. Raises DataError for no such file."""
    if Path(file).suffix.lower() in ROWS:
        return [BatchQuestion(row.uid, question_of(row), row.prompt) for row in load_rows(file)]
    try:
        lines = read_text(Path(file), MOST).split("\n")
    except (OSError, ValueError) as error:
        fix = "give a text file in UTF-8, or rows as .parquet or .jsonl"
        raise DataError(explain(f"--file {file}", str(error), "questions", fix)) from error
    asked = [(number, line.strip()) for number, line in enumerate(lines) if line.strip()]
    found = [BatchQuestion(f"{Path(file).name}#{number}", line) for number, line in asked]
    if not found:
        fix = "write one question a line, or give rows as .parquet or .jsonl"
        raise DataError(explain(f"--file {file}", "no question", "questions", fix))
    return found


async def answer_all(questions: Sequence[BatchQuestion], session: AgentSession, out: TextIO) -> int:
    """Write one JSON object a line, in order, as soon as can be; returns how many failed."""
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


def answer(options: InferOptions) -> int:
    """Do what the command line asks for; returns the exit code."""
    log(logging.WARNING, logging.BASIC_FORMAT)
    transformers_logging.disable_progress_bar()
    terminal = Terminal(Console(highlight=False), options.show_documents)
    if options.file is not None:
        return asyncio.run(ask_file(options, str(options.file), options.out))
    if options.interactive:
        converse(options, terminal)
        return 0
    question = QUESTION if options.question is None else options.question
    if options.question is None and not options.json:
        terminal.note(f"question: {question}")
    reply = asyncio.run(ask(options, question, SILENCE if options.json else terminal))
    if options.json:
        sys.stdout.write(json_line(reply.to_json()))
    else:
        terminal.conclude(reply)
    return 0


async def ask(options: InferenceOptions, question: str, listener: DialogueListener) -> Reply:
    """Run one dialogue. Raises ToolError when a search fails."""
    async with opened(options) as session:
        reply = await session.ask(question, session.prompt(question), listener)
    if reply.status is Status.FAILED:
        raise ToolError(reply.error)
    return reply


async def ask_file(options: InferenceOptions, file: str, out: Path | None) -> int:
    """Answer every question of a file; returns the exit code, 2 when one failed."""
    questions = read_questions(file)
    # What cannot be written, or another run writes, is found out before a model is loaded.
    held = contextlib.nullcontext() if out is None else exclusive_lock(out, "--out", lock=out)
    with held:
        async with opened(options) as session:
            with (
                _told_of(out),
                contextlib.nullcontext(sys.stdout)
                if out is None
                else out.open("w", encoding="utf-8") as target,
            ):
                num_failed = await answer_all(questions, session, target)
    if num_failed:
        sys.stderr.write(f"{num_failed} of {len(questions)} dialogues failed: see their «error»\n")
    return 2 if num_failed else 0


@contextlib.contextmanager
def _told_of(out: Path | None) -> Iterator[None]:
    """Translate what keeps `out` from being written, also out of a group of tasks."""
    problem = ""
    try:
        yield
    except* OSError as errors:
        problem = str(errors.exceptions[0])
    if problem:
        fix = "name another file, or make room"
        raise DataError(explain(f"--out {out or ''}", problem, "a file that can be written", fix))
