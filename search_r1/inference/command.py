"""Implements `search-r1 infer`: one question, a conversation, or a file of questions."""

import asyncio
import logging
import sys

from huggingface_hub.utils.tqdm import disable_progress_bars
from rich.console import Console

from search_r1.infer import QUESTION, InferOptions
from search_r1.inference.agent_options import InferenceOptions
from search_r1.inference.dialogue import SILENCE, DialogueListener, Reply
from search_r1.inference.ending import exits_at_signals
from search_r1.inference.opening import open_session
from search_r1.inference.terminal import Terminal
from search_r1.plain import configure_logging, json_line
from verl.errors import ToolError
from verl.types import Status


@exits_at_signals()
def answer(options: InferOptions) -> int:
    """Run the command for these options and return the exit code."""
    configure_logging(logging.WARNING, logging.BASIC_FORMAT)
    disable_progress_bars()
    terminal = Terminal(Console(highlight=False), options.show_documents)
    if options.file is not None:
        from search_r1.inference.batch import ask_file  # noqa: PLC0415 by option

        return asyncio.run(ask_file(options, str(options.file), options.out))
    if options.interactive:
        from search_r1.inference.conversation import converse  # noqa: PLC0415 by option

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
    """Run one dialogue. Raises ToolError if a search fails."""
    async with open_session(options) as session:
        reply = await session.ask(question, session.prompt(question), listener)
    if reply.status is Status.FAILED:
        raise ToolError(reply.error)
    return reply
