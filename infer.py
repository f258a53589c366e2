"""Ask a search agent: `python infer.py "question"`, a conversation, or a file of questions.

The agent loop is that of training. The dialogue streams, documents are folded to their titles, and
the answer comes last with its sources; `--json` prints one object for scripts instead. A mistake
of the user ends in one message and exit code 2. See docs/asking.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from transformers.utils import logging as transformers_logging

from example.smollm2.shipped import with_model
from search_r1.inference.batch import answer_all, read_questions
from search_r1.inference.dialogue import SILENCE, Hearer, Reply
from search_r1.inference.interactive import converse
from search_r1.inference.opening import AskingOptions, opened
from search_r1.inference.terminal import Terminal
from verl.errors import RetrieverError, SearchR1Error
from verl.types import Status


async def ask(options: AskingOptions, question: str, hearer: Hearer) -> Reply:
    """Play one dialogue. Raises RetrieverError when a search fails."""
    async with opened(options) as asker:
        reply = await asker.ask(question, asker.prompt(question), hearer)
    if reply.status is Status.FAILED:
        raise RetrieverError(reply.error)
    return reply


async def ask_file(options: AskingOptions, file: str, out: Path | None) -> int:
    """Answer every question of a file; returns the exit code, 2 when one failed."""
    questions = read_questions(file)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    async with opened(options) as asker:
        target = sys.stdout if out is None else out.open("w", encoding="utf-8")
        with contextlib.nullcontext(target) if out is None else target:
            num_failed = await answer_all(questions, asker, target)
    if num_failed:
        sys.stderr.write(f"{num_failed} of {len(questions)} dialogues failed: see their «error»\n")
    return 2 if num_failed else 0


def parser() -> argparse.ArgumentParser:
    """The command line; defaults live in the options alone."""
    whole = argparse.ArgumentParser(
        prog="infer.py", description=__doc__, argument_default=argparse.SUPPRESS
    )
    asked = whole.add_mutually_exclusive_group(required=True)
    asked.add_argument("question", nargs="?", default=None)
    asked.add_argument("--interactive", action="store_true", default=False,
                       help="a conversation: follow-up questions see what was said")  # fmt: skip
    asked.add_argument("--file", default=None,
                       help="text, one question a line, or rows as parquet or jsonl")  # fmt: skip
    shown = whole.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", default=False,
                       help="print one JSON object only")  # fmt: skip
    shown.add_argument("--show-documents", action="store_true", default=False,
                       help="print what searches find in full")  # fmt: skip
    whole.add_argument("--out", type=Path, default=None,
                       help="jsonl of the answers to --file; default: standard output")  # fmt: skip
    for name, more in AskingOptions.arguments():
        whole.add_argument(name, **more)
    return whole


def act(given: argparse.Namespace, options: AskingOptions) -> int:
    """Do what the command line asks for; returns the exit code."""
    terminal = Terminal(Console(highlight=False), given.show_documents)
    if given.file is not None:
        return asyncio.run(ask_file(options, given.file, given.out))
    if given.interactive:
        converse(options, terminal)
        return 0
    reply = asyncio.run(ask(options, given.question, SILENCE if given.json else terminal))
    if given.json:
        sys.stdout.write(json.dumps(reply.to_json(), ensure_ascii=False) + "\n")
    else:
        terminal.conclude(reply)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry; returns the exit code."""
    command = parser()
    given = command.parse_args(argv)
    if given.interactive and given.json:
        command.error("--json prints one object: give a question, or --file")
    if given.out is not None and given.file is None:
        command.error("--out is where --file writes its answers: give both")
    logging.basicConfig(level=logging.WARNING)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    own = {"question", "interactive", "file", "json", "show_documents", "out"}
    try:
        options = {name: value for name, value in vars(given).items() if name not in own}
        return act(given, AskingOptions.given(with_model(options)))
    except SearchR1Error as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
