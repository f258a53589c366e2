"""Ask one question: `python infer.py "question"`.

The agent loop is that of training; only the engine differs. The dialogue streams in colour and
the answer comes last; `--json` prints one object for scripts instead. A mistake of the user ends
in one message and exit code 2.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from search_r1.llm_agent.generation import EMPTY, AgentConfig, SearchAgent
from search_r1.llm_agent.tags import TEMPLATES, ActionKind, parse_action
from search_r1.search.client import EmptyRetrieval, Retrieval, RetrievalClient
from search_r1.search.errors import RetrieverRefused, RetrieverUnavailable
from verl.data import render
from verl.errors import ModelError, RetrieverError, SearchR1Error, explain
from verl.protocol import (
    Completion,
    Engine,
    Origin,
    Sampling,
    Status,
    Trajectory,
    start_trajectory,
)
from verl.rows import Row
from verl.workers.devices import device_type, dtype_name, resolve_dtype
from verl.workers.rollout.remote_engine import RemoteEngine
from verl.workers.rollout.transformers_engine import TransformersEngine
from verl.workers.rollout.vllm_engine import EngineConfig, VllmEngine

DEFAULT_MODEL = Path("runs/demo/model")
DEFAULT_RETRIEVER = "http://127.0.0.1:8000/retrieve"
SETTINGS_FILE = "search_r1.json"
STYLES = {Origin.POLICY: "cyan", Origin.OBSERVATION: "yellow"}


@dataclass(frozen=True)
class Settings:
    """How a checkpoint was trained to talk; its folder says so in `search_r1.json`."""

    template: str = "search_r1"
    max_turns: int = 4
    topk: int = 3

    @classmethod
    def read(cls, model: str) -> Settings:
        """The checkpoint's settings, or the defaults for a model that brings none."""
        file = Path(model) / SETTINGS_FILE
        if not file.is_file():
            return cls()
        written = json.loads(file.read_text(encoding="utf-8"))
        known = {name: written[name] for name in cls.__dataclass_fields__ if name in written}
        return cls(**known)


@dataclass
class Narrator:
    """An engine that shows a dialogue while another engine makes it."""

    engine: Engine
    tokenizer: Any
    console: Console
    is_streaming: bool
    """The engine shows its own tokens as they come."""
    num_shown: int

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Show what the environment added, then what the policy says."""
        show(self.console, self.tokenizer.decode(prompt_ids[self.num_shown :]), Origin.OBSERVATION)
        completion = await self.engine.generate(prompt_ids, sampling)
        if not self.is_streaming:
            show(self.console, completion.text, Origin.POLICY)
        self.num_shown = len(prompt_ids) + len(completion.ids)
        return completion


def show(console: Console, text: str, origin: Origin) -> None:
    """Print text in the colour of its origin, as it is."""
    console.print(Text(text, style=STYLES[origin]), end="", soft_wrap=True)


async def connect(url: str, topk: int) -> Retrieval:
    """The retriever, known to be there; raises RetrieverError with the command that starts it."""
    if url == EMPTY:
        return EmptyRetrieval()
    try:
        client = RetrievalClient(url, topk, max_retries=1)
        await client.health()
    except RetrieverRefused:
        return client  # a server of another make has no /health, but it answers
    except (RetrieverUnavailable, ValueError) as error:
        fix = "bash retrieval_launch.sh, or --retriever-url URL, or --retriever-url empty"
        raise RetrieverError(explain("retriever", str(error), "a search server", fix)) from error
    return client


def load_tokenizer(model: str) -> Any:
    """The model's tokenizer; raises ModelError when there is no such model."""
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        fix = "run make demo, or give --model a Hugging Face folder or name"
        reason = str(error).splitlines()[0]
        raise ModelError(explain(f"model {model}", reason, "a Hugging Face model", fix)) from error


def build_engine(arguments: argparse.Namespace, tokenizer: Any, console: Console) -> Engine:
    """The engine that the command line asks for."""
    if arguments.endpoint:
        return RemoteEngine(
            arguments.endpoint, arguments.served_model or arguments.model, tokenizer
        )
    device = device_type("auto")
    dtype = dtype_name(resolve_dtype("auto", torch.device(device)))
    if arguments.engine == "vllm":
        length = AgentConfig.max_prompt_length + AgentConfig.max_response_length
        return VllmEngine(EngineConfig(arguments.model, length, device, dtype, max_num_seqs=1))
    return TransformersEngine.from_folder(
        arguments.model, device, dtype, lambda text: show(console, text, Origin.POLICY)
    )


async def ask(arguments: argparse.Namespace, console: Console) -> Trajectory:
    """Play one dialogue."""
    if not arguments.endpoint and arguments.model == str(DEFAULT_MODEL):
        require_demo(DEFAULT_MODEL)
    settings = Settings.read(arguments.model)
    template = TEMPLATES[arguments.template or settings.template]
    max_turns = settings.max_turns if arguments.max_turns is None else arguments.max_turns
    tokenizer = load_tokenizer(arguments.model)
    retrieval = await connect(arguments.retriever_url, arguments.topk or settings.topk)
    agent = SearchAgent(AgentConfig(max_turns, template=template), tokenizer, retrieval)
    message = {"role": "user", "content": template.user_prompt(arguments.question)}
    prompt = render(Row("question", 0, (message,), "infer", ()), tokenizer)
    engine = build_engine(arguments, tokenizer, console)
    is_streaming = isinstance(engine, TransformersEngine)
    narrator = Narrator(engine, tokenizer, console, is_streaming, len(prompt.ids))
    sampling = Sampling(AgentConfig.max_response_length, arguments.temperature)
    try:
        return await agent.run(start_trajectory(prompt, seed=arguments.seed), narrator, sampling)
    finally:
        if isinstance(engine, VllmEngine):
            await engine.shutdown()
        if isinstance(retrieval, RetrievalClient):
            await retrieval.aclose()


def require_demo(folder: Path) -> None:
    """Raise ModelError when the demo has left no checkpoint."""
    if not folder.is_dir():
        fix = "run make demo, or give --model a Hugging Face folder or name"
        raise ModelError(explain(f"model {folder}", "no such folder", "the demo's checkpoint", fix))


def answer_of(trajectory: Trajectory) -> str | None:
    """The answer that ended the dialogue, if one did."""
    if trajectory.status is not Status.ANSWERED:
        return None
    action = parse_action(trajectory.segments[-1].text)
    return action.content if action.kind is ActionKind.ANSWER else None


def to_json(question: str, trajectory: Trajectory) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "question": question,
        "answer": answer_of(trajectory),
        "status": trajectory.status.value,
        "segments": [
            {"origin": segment.origin.name.lower(), "text": segment.text}
            for segment in trajectory.segments
            if segment.origin is not Origin.PROMPT
        ],
        "stats": trajectory.stats,
    }


def report(arguments: argparse.Namespace, trajectory: Trajectory, console: Console) -> None:
    """Print the outcome after the dialogue."""
    if arguments.json:
        sys.stdout.write(json.dumps(to_json(arguments.question, trajectory)) + "\n")
        return
    answer = answer_of(trajectory)
    missing = Text(f"no answer ({trajectory.status.value})", style="bold red")
    console.print()
    console.print(missing if answer is None else Text(f"Answer: {answer}", style="bold green"))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Ask a search agent one question.")
    parser.add_argument("question")
    parser.add_argument("--model", default=str(DEFAULT_MODEL), help="Hugging Face folder or name")
    parser.add_argument("--endpoint", help="OpenAI-compatible server, e.g. http://host:8000/v1")
    parser.add_argument("--served-model", help="the model's name at --endpoint; default --model")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--retriever-url", default=DEFAULT_RETRIEVER, help="or: empty")
    parser.add_argument("--template", choices=sorted(TEMPLATES), help="default: the checkpoint's")
    parser.add_argument("--max-turns", type=int, help="searches; default: the checkpoint's")
    parser.add_argument("--topk", type=int, help="documents a search; default: the checkpoint's")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, help="makes sampling repeatable")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry; returns the exit code."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    console = Console(quiet=arguments.json, highlight=False)
    try:
        trajectory = asyncio.run(ask(arguments, console))
        if trajectory.status is Status.FAILED:
            raise RetrieverError(trajectory.error)
    except SearchR1Error as error:
        sys.stderr.write(f"{error}\n")
        return 2
    report(arguments, trajectory, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
