"""The Python API for trained agents: answering questions and running evaluations.

Equivalent to `search-r1 infer` and `search-r1 evaluate`, with their options as keywords.
"""

import asyncio
import contextlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from search_r1.evaluation.evaluating import run_evaluation
from search_r1.evaluation.options import EvaluationOptions
from search_r1.evaluation.samples import Sample
from search_r1.evaluation.store import read_evaluation
from search_r1.inference.agent_options import InferenceOptions
from search_r1.inference.dialogue import SILENCE, DialogueListener, Reply
from search_r1.inference.model_name import Options
from search_r1.inference.opening import open_session
from search_r1.loops import LoopThread
from search_r1.python_objects import AgentLike, PythonObjects, RetrieverLike, ToolLike
from search_r1.retrieval.local_server import LocalServer
from verl import plugins
from verl.config.overrides import short_repr
from verl.errors import ConfigError, ToolError, did_you_mean, explain
from verl.types import Status


class SearchAgent:
    """A running agent; `close` it, or use it as a context manager."""

    def __init__(self, options: InferenceOptions, passed: PythonObjects, retriever: Any) -> None:
        """Start the agent; use `load_agent` instead. Raises UserError."""
        with contextlib.ExitStack() as stack:
            options = with_local_server(options, retriever, stack)
            self._loop = stack.enter_context(LoopThread())
            session = contextlib.AsyncExitStack()
            with plugins.registered(passed.objects):
                self._session = self._loop.run(session.enter_async_context(open_session(options)))
            stack.callback(lambda: self._loop.run(session.aclose()))
            self._stack = stack.pop_all()

    def ask(self, question: str, listener: DialogueListener = SILENCE) -> Reply:
        """Answer a question; the reply has the answer, the searches and the trajectory.

        `listener` receives the dialogue's events as they happen, in another thread. Raises
        ToolError if a search fails after all retries, and UserError if the engine fails.
        """
        reply = self._loop.run(self._ask(question, listener))
        if reply.status is Status.FAILED:
            raise ToolError(reply.error)
        return reply

    __call__ = ask

    def ask_all(self, questions: Sequence[str]) -> list[Reply]:
        """Answer questions concurrently; a failed search gives `status` FAILED and an `error`.

        Raises UserError, without the other replies, if a question is too long or the engine fails.
        """
        slots = asyncio.Semaphore(self._session.num_at_once)

        async def answer(question: str) -> Reply:
            async with slots:
                return await self._ask(question)

        async def answer_all() -> list[Reply]:
            tasks = [asyncio.ensure_future(answer(question)) for question in questions]
            try:
                return await asyncio.gather(*tasks)
            finally:  # an error must not leave dialogues running on the engine
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        return self._loop.run(answer_all())

    async def _ask(self, question: str, listener: DialogueListener = SILENCE) -> Reply:
        return await self._session.ask(question, self._session.prompt(question), listener)

    def close(self) -> None:
        """Shut down the engine; further calls do nothing."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_agent(
    model: str | Path = "",
    *,
    retriever: str | RetrieverLike | None = None,
    tools: Sequence[str | ToolLike] | None = None,
    agent: str | AgentLike | None = None,
    **options: Any,
) -> SearchAgent:
    """Start the agent of a model folder, hub name, checkpoint `global_step_N`, or run folder.

    `options` are those of `search-r1 infer` (`InferenceOptions`): `engine="vllm"`, `topk=5`, ….
    `retriever` is an address, "empty", a `LocalServer` to start, or a function or object that finds
    documents; `tools` are names, classes or objects that replace the model's own tools, and `agent`
    replaces its agent likewise. Raises UserError.
    """
    passed, names = _register(retriever, tools, agent)
    agent_options = typed_options(InferenceOptions, {"model": str(model), **names, **options})
    return SearchAgent(agent_options, passed, retriever)


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation."""

    scores: Mapping[str, Mapping[str, float | None]]
    """By set of questions (including "all rows"), then by measure; None if undefined."""
    intervals: Mapping[str, Mapping[str, tuple[float, float] | None]]
    """95 % intervals, by set and measure; None if undefined."""
    rows: Sequence[Sample]
    """Each dialogue with its question, answer, searches and scores."""
    folder: Path | None
    """The folder of the evaluation, if `out` was passed."""


def evaluate(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    retriever: str | RetrieverLike | None = None,
    tools: Sequence[str | ToolLike] | None = None,
    agent: str | AgentLike | None = None,
    **options: Any,
) -> Evaluation:
    """Run and score every row of the data. Raises UserError.

    `options` are those of `search-r1 evaluate` (`EvaluationOptions`). With `out`, the evaluation is
    kept in that folder, and an interrupted one is resumed; without it, no files are kept.
    """
    passed, values = _register(retriever, tools, agent)
    files = [str(file) for file in ([data] if isinstance(data, str | Path) else data)]
    with contextlib.ExitStack() as stack:
        folder = Path(out or stack.enter_context(tempfile.TemporaryDirectory()) + "/evaluation")
        values |= {"model": str(model), "data": files, "out": str(folder), **options}
        chosen = with_local_server(typed_options(EvaluationOptions, values), retriever, stack)
        stack.enter_context(plugins.registered(passed.objects))
        estimates = run_evaluation(chosen).estimates
        _, rows = read_evaluation(folder)
    scores = {
        name: {measure: estimate.value for measure, estimate in measures.items()}
        for name, measures in estimates.items()
    }
    intervals = {
        name: {m: (e.interval.low, e.interval.high) if e.interval else None
               for m, e in measures.items()}
        for name, measures in estimates.items()
    }  # fmt: skip
    return Evaluation(scores, intervals, rows, Path(out) if out else None)


def _register(
    retriever: Any, tools: Sequence[Any] | None, agent: Any
) -> tuple[PythonObjects, dict[str, Any]]:
    """Register passed objects; return them, and the option values that name them."""
    passed, values = PythonObjects(), dict[str, Any]()
    if retriever is not None and not isinstance(retriever, LocalServer):
        values["retriever_url"] = passed.retriever(retriever)
    if tools is not None:
        values["tools"] = passed.tools("tools", tools)
    if agent is not None:
        values["agent"] = passed.name("agent", agent, "run")
    return passed, values


def with_local_server(options: Options, retriever: Any, stack: contextlib.ExitStack) -> Options:
    """Start a passed `LocalServer`, which `stack` stops, and set the options to its address."""
    if not isinstance(retriever, LocalServer):
        return options
    return replace(options, retriever_url=stack.enter_context(retriever).url)


def typed_options(kind: type[Options], values: Mapping[str, Any]) -> Options:
    """Build a command's options from keywords. Raises ConfigError that names the keywords."""
    names = [field.name for field in fields(kind)]
    for name in values.keys() - names:
        fix = did_you_mean(name, names, "leave it out")
        raise ConfigError(explain(name, values[name], f"one of {', '.join(names)}", fix))
    try:
        return TypeAdapter(kind).validate_python(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        key, got = str(first["loc"][0]) if first["loc"] else "options", short_repr(first["input"])
        raise ConfigError(explain(key, got, first["msg"], "correct it")) from error
    except ConfigError as error:  # with the command line's --flags
        text = re.sub(r"--([a-z][a-z-]*)", lambda flag: flag[1].replace("-", "_"), str(error))
        raise ConfigError(text) from error
