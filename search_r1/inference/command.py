"""What `search-r1 infer` does: one question, a conversation, or a file of questions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from transformers.utils import logging as transformers_logging

from search_r1.infer import QUESTION, InferOptions
from search_r1.inference.batch import answer_all, read_questions
from search_r1.inference.dialogue import SILENCE, DialogueListener, Reply
from search_r1.inference.interactive import converse
from search_r1.inference.opening import opened
from search_r1.inference.options import InferenceOptions
from search_r1.inference.terminal import Terminal
from search_r1.plain import json_line, log
from verl.errors import DataError, ToolError, explain
from verl.locks import exclusive
from verl.types import Status


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
    held = contextlib.nullcontext() if out is None else exclusive(out, "--out", lock=out)
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
