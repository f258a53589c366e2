"""A trained agent from Python: questions answered, and evaluations with their rows.

What `search-r1 infer` and `search-r1 evaluate` do, with their options as keywords.
"""

import asyncio
import contextlib
import difflib
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import TypeAdapter, ValidationError

from search_r1.evaluation import running
from search_r1.evaluation.options import EvaluationOptions
from search_r1.evaluation.samples import Sample
from search_r1.evaluation.store import METRICS, read_evaluation
from search_r1.inference.dialogue import SILENCE, DialogueListener, Reply
from search_r1.inference.opening import open_session
from search_r1.inference.options import AgentOptions, InferenceOptions
from search_r1.loops import LoopThread
from search_r1.python_objects import Finder, PythonObjects
from search_r1.search.local_server import LocalServer
from search_r1.search.retrieval import Retrieval
from verl import plugins
from verl.agent.interface import Tool
from verl.config import Config
from verl.config.overrides import short_repr
from verl.errors import ConfigError, ToolError, explain
from verl.types import Status

Options = TypeVar("Options", bound=AgentOptions)
OwnTool = Tool | Callable[[Config], Tool]
OwnRetriever = Retrieval | Finder | LocalServer


class SearchAgent:
    """A running agent; `close` it, or use it as a context manager."""

    def __init__(self, options: InferenceOptions, given: PythonObjects, retriever: Any) -> None:
        """`load_agent` makes one. Raises UserError."""
        with contextlib.ExitStack() as stack:
            options = served(options, retriever, stack)
            self._loop = stack.enter_context(LoopThread())
            session = contextlib.AsyncExitStack()
            with plugins.registered(given.objects):
                self._session = self._loop.run(session.enter_async_context(open_session(options)))
            stack.callback(lambda: self._loop.run(session.aclose()))
            self._stack = stack.pop_all()

    def ask(self, question: str, listener: DialogueListener = SILENCE) -> Reply:
        """Play one dialogue: the answer, its searches with what they found, and the trajectory.

        `listener` hears it as it happens, in another thread. Raises ToolError where a search failed
        for good, and UserError where the engine did.
        """
        reply = self._loop.run(self._ask(question, listener))
        if reply.status is Status.FAILED:
            raise ToolError(reply.error)
        return reply

    __call__ = ask

    def ask_all(self, questions: Sequence[str]) -> list[Reply]:
        """A reply to each, many at once; one that failed has `status` FAILED and an `error`."""
        places = asyncio.Semaphore(self._session.num_at_once)

        async def one(question: str) -> Reply:
            async with places:
                return await self._ask(question)

        async def all_of_them() -> list[Reply]:
            return await asyncio.gather(*map(one, questions))

        return self._loop.run(all_of_them())

    async def _ask(self, question: str, listener: DialogueListener = SILENCE) -> Reply:
        return await self._session.ask(question, self._session.prompt(question), listener)

    def close(self) -> None:
        """End the engine; a second call does nothing."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_agent(
    model: str | Path = "",
    *,
    retriever: str | OwnRetriever | None = None,
    tools: Sequence[str | OwnTool] | None = None,
    **options: Any,
) -> SearchAgent:
    """The agent of a model folder, a hub name, a checkpoint `global_step_N`, or a run's folder.

    `options` are those of `search-r1 infer` (`InferenceOptions`): `engine="vllm"`, `topk=5`, ….
    `retriever` is an address, "empty", a server to be started, or what finds documents here;
    `tools` are names, classes or objects in place of the model's own. Raises UserError.
    """
    given, words = _given(retriever, tools)
    chosen = typed_options(InferenceOptions, {"model": str(model), **words, **options})
    return SearchAgent(chosen, given, retriever)


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found."""

    scores: Mapping[str, Mapping[str, float | None]]
    """By set of questions ("all rows" among them), then by measure; None where undefined."""
    intervals: Mapping[str, Mapping[str, tuple[float, float] | None]]
    """Bounds of 95 %, likewise."""
    rows: Sequence[Sample]
    """Each dialogue with its question, answer, searches and measures."""
    folder: Path | None
    """Where it is kept; None for one that was given no folder."""


def evaluate(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    retriever: str | OwnRetriever | None = None,
    tools: Sequence[str | OwnTool] | None = None,
    **options: Any,
) -> Evaluation:
    """Play and score every row of the data. Raises UserError.

    `options` are those of `search-r1 evaluate` (`EvaluationOptions`). With `out`, an evaluation
    that was interrupted goes on, and its tables can be made from there; `None` keeps nothing.
    """
    given, words = _given(retriever, tools)
    files = [str(one) for one in ([data] if isinstance(data, str | Path) else data)]
    with contextlib.ExitStack() as stack:
        folder = Path(out or stack.enter_context(tempfile.TemporaryDirectory()) + "/evaluation")
        words |= {"model": str(model), "data": files, "out": str(folder), **options}
        chosen = typed_options(EvaluationOptions, words)
        chosen = served(chosen, retriever, stack)
        stack.enter_context(plugins.registered(given.objects))
        running.evaluate(chosen)
        estimates = json.loads((folder / METRICS).read_bytes())["estimates"]
        _, rows = read_evaluation(folder)
    scores = {name: {m: e["value"] for m, e in found.items()} for name, found in estimates.items()}
    bounds = {
        name: {m: (i["low"], i["high"]) if (i := e["interval"]) else None for m, e in found.items()}
        for name, found in estimates.items()
    }
    return Evaluation(scores, bounds, rows, Path(out) if out else None)


def _given(retriever: Any, tools: Sequence[Any] | None) -> tuple[PythonObjects, dict[str, Any]]:
    """The objects, and the options that name them."""
    given, words = PythonObjects(), dict[str, Any]()
    if retriever is not None and not isinstance(retriever, LocalServer):
        words["retriever_url"] = given.retriever(retriever)
    if tools is not None:
        words["tools"] = given.tools("tools", tools)
    return given, words


def served(options: Options, retriever: Any, stack: contextlib.ExitStack) -> Options:
    """The options with the address of a server that was given, which runs with the stack."""
    if not isinstance(retriever, LocalServer):
        return options
    url = stack.enter_context(retriever).url
    return type(options)(**{**vars(options), "retriever_url": url})


def typed_options(kind: type[Options], given: Mapping[str, Any]) -> Options:
    """The options of a command from keywords. Raises ConfigError in the words of Python."""
    names = [field.name for field in fields(kind)]
    for name in given.keys() - names:
        near = difflib.get_close_matches(name, names, n=1)
        fix = f"did you mean {near[0]}?" if near else "leave it out"
        raise ConfigError(explain(name, given[name], f"one of {', '.join(names)}", fix))
    try:
        return TypeAdapter(kind).validate_python(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        key, got = str(first["loc"][0]) if first["loc"] else "options", short_repr(first["input"])
        raise ConfigError(explain(key, got, first["msg"], "correct it")) from error
    except ConfigError as error:
        text = re.sub(r"--([a-z][a-z-]*)", lambda flag: flag[1].replace("-", "_"), str(error))
        raise ConfigError(text) from error
