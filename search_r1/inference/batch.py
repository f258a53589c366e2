"""Answers a file of questions: concurrently, and written in the order of the file."""

import asyncio
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from search_r1.agent.generation import check_prompts
from search_r1.agent.question import question_of
from search_r1.inference.agent_options import InferenceOptions
from search_r1.inference.dialogue import AgentSession
from search_r1.inference.opening import open_session
from search_r1.plain import json_line
from verl.data.records import MAX_ROW_CHARS, BadRow
from verl.data.rows import Message, load_rows
from verl.errors import DataError, UserError, explain
from verl.files import exclusive_lock, read_text
from verl.types import Status

ROW_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".tsv")
"""File types that are not read as plain text; `load_rows` refuses those it does not support."""
MAX_CHARS = 2**28
"""Maximum number of characters of a text file: some million questions."""


@dataclass(frozen=True)
class BatchQuestion:
    """One question of a file."""

    uid: str
    """`file#row`, counted from 0 (for a text file, the line)."""
    question: str
    messages: str | Sequence[Message] | None = None
    """The prompt of a data row; None for a plain question, which the dialogue format words."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """That of the data row."""


def read_questions(file: str) -> list[BatchQuestion]:
    """Read a text file with one question per line, or a file of rows. Raises DataError."""
    if Path(file).suffix.lower() in ROW_SUFFIXES:
        rows = load_rows(file)
        return [BatchQuestion(r.uid, question_of(r), r.prompt, r.extra_info) for r in rows]
    try:
        lines = read_text(Path(file), MAX_CHARS).split("\n")
    except (OSError, ValueError) as error:
        fix = "give a text file in UTF-8, or rows as .parquet or .jsonl"
        raise DataError(explain(f"--file {file}", str(error), "questions", fix)) from error
    name, texts = Path(file).name, map(str.strip, lines)
    questions = [BatchQuestion(f"{name}#{n}", text) for n, text in enumerate(texts) if text]
    if long := next((one for one in questions if len(one.question) > MAX_ROW_CHARS), None):
        problem = BadRow.too_long(
            file, int(long.uid.rpartition("#")[2]), "", f"{len(long.question)}"
        )
        raise DataError(problem.problem)
    if not questions:
        fix = "write one question per line, or give rows as .parquet or .jsonl"
        raise DataError(explain(f"--file {file}", "no question", "questions", fix))
    return questions


async def answer_all(questions: Sequence[BatchQuestion], session: AgentSession, out: TextIO) -> int:
    """Write one JSON line per question, in order; return the number of failed questions."""
    slots = asyncio.Semaphore(session.num_at_once)
    num_failed = 0
    with tqdm(total=len(questions), desc="ask", unit="question") as bar:

        async def run(question: BatchQuestion) -> dict[str, Any]:
            async with slots:
                line = await _answer(question, session)
            bar.update()
            return line

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(question)) for question in questions]
            for task in tasks:
                line = await task
                num_failed += line["status"] == Status.FAILED.value
                out.write(json_line(line))
                out.flush()
    return num_failed


def check_rows(questions: Sequence[BatchQuestion], session: AgentSession) -> None:
    """Raise DataError for prompts of rows with other tags than the agent's; warn of other words.

    Those that cannot be asked are left out: each fails alone.
    """
    prompts = []
    for question in questions:
        if question.messages is not None:
            with contextlib.suppress(DataError):
                prompt = session.render(question.messages, question.uid, question.extra_info)
                prompts.append(replace(prompt, uid=question.uid))
    check_prompts(session.agent.format, prompts)


async def _answer(question: BatchQuestion, session: AgentSession) -> dict[str, Any]:
    """Return the reply as JSON, or a failed status with the error."""
    uid, text, messages = question.uid, question.question, question.messages
    try:
        if messages is None:
            prompt = session.prompt(text)
        else:
            prompt = session.render(messages, uid, question.extra_info)
        reply = await session.ask(text, prompt)
    except UserError as error:
        failed = {"status": Status.FAILED.value, "error": str(error), "answer": None}
        return {"uid": uid, "question": text, **failed}
    return {"uid": uid, **reply.to_json()}


async def ask_file(options: InferenceOptions, file: str, out: Path | None) -> int:
    """Answer every question of a file; return the exit code, which is 2 if any question failed.

    Raises DataError for a file that cannot be read, or whose rows have other tags (`check_rows`).
    """
    questions = read_questions(file)
    # Lock the output before loading a model, so that an unwritable file fails at once.
    lock = contextlib.nullcontext() if out is None else exclusive_lock(out, "--out", lock=out)
    is_new = out is not None and not out.exists()
    with lock:
        try:
            async with open_session(options) as session:
                check_rows(questions, session)
                with _open_output(out) as target:
                    num_failed = await answer_all(questions, session, target)
        finally:
            if is_new and out is not None and out.exists() and not out.stat().st_size:
                out.unlink()  # it was created for the lock only
    if num_failed:
        sys.stderr.write(f"{num_failed} of {len(questions)} dialogues failed: see their «error»\n")
    return 2 if num_failed else 0


@contextlib.contextmanager
def _open_output(out: Path | None) -> Iterator[TextIO]:
    """Open `out`, or standard output for None. Raises DataError if `out` cannot be written."""
    problem: Exception | None = None
    try:
        if out is None:
            yield sys.stdout
        else:
            with out.open("w", encoding="utf-8") as file:
                yield file
    except* OSError as errors:  # raised directly, or by a task group as an exception group
        problem = errors.exceptions[0]
    if problem is None:
        return
    if out is None:
        raise problem  # such as a closed pipe, which ends a command as in a shell
    fix = "name another file, or free disk space"
    raise DataError(explain(f"--out {out}", str(problem), "a file that can be written", fix))
