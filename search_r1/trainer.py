"""Training from Python: a typed configuration, objects of the caller's, callbacks, the history.

The run is that of `search-r1 train`: the same checks, files and checkpoints, so that either goes on
with what the other began. Mistakes raise `verl.errors.UserError`; see docs/python_api.md.
"""

import contextlib
import copy
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from search_r1.python_objects import Finder, PythonObjects
from search_r1.rewards import RewardInput, RewardOutput
from search_r1.search.local_server import LocalServer
from search_r1.search.retrieval import Retrieval
from verl import plugins
from verl.agent.interface import Agent, Tool
from verl.checkpoint import folders
from verl.config import Config, cli
from verl.errors import ConfigError, PluginError, explain
from verl.logs import start_logging
from verl.monitor.tracking import Tracker
from verl.rewards.interface import RewardManager

Listener = Callable[[int, Mapping[str, float]], object]
"""Called with a step and its metrics; what it gives is not looked at."""
OwnReward = Callable[[RewardInput], float | RewardOutput] | RewardManager | type[RewardManager]
OwnTool = Tool | Callable[[Config], Tool]
OwnAgent = Agent | Callable[[Config], Agent]
OwnRetriever = Retrieval | Finder | LocalServer
OF_VALIDATION = "val/"


@dataclass(frozen=True)
class History:
    """What a run has logged and left."""

    steps: tuple[Mapping[str, float], ...]
    """The rows of `metrics.jsonl` that this call wrote: `step` and the metrics of that step."""
    checkpoint: Path | None
    """The folder of the last checkpoint, if there is one."""
    model: Path | None
    """The trained policy as a Hugging Face folder, once the run has come to its end."""


class Trainer:
    """One training run; `train` may be called again, as a command may be given again."""

    def __init__(
        self,
        config: Config | Sequence[str],
        *,
        agent: str | OwnAgent | None = None,
        tools: Sequence[str | OwnTool] | None = None,
        reward: str | OwnReward | None = None,
        retriever: str | OwnRetriever | None = None,
        on_step: Listener | None = None,
        on_validation: Listener | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        """Check everything that needs no machine. Raises ConfigError.

        `config` is a `Config`, which is copied, or the words of a command line; `overrides`, each
        `key=value`, win over it. What is given beside it takes the place of its `agent.name`,
        `agent.tools`, `reward_model.name` and `retriever.url`: names as there, or objects. A class
        or function of agents and tools is called with the run's options in each process that needs
        one; an object is pickled there. Rewards and callbacks stay in this process. A `LocalServer`
        runs as long as the training.
        """
        options = copy.deepcopy(config) if isinstance(config, Config) else cli.compose(config)
        given, self._server = PythonObjects(), None
        if agent is not None:
            options.agent.name = given.name("agent.name", agent, "run")
        if tools is not None:
            options.agent.tools = given.tools("agent.tools", tools)
        travelling = dict(given.objects)
        if isinstance(retriever, LocalServer):
            self._server = retriever
        elif retriever is not None:
            options.retriever.url = given.retriever(retriever)
            travelling = dict(given.objects)
        if reward is not None:
            options.reward_model.name = given.reward(reward)
        for name, heard in (("on_step", on_step), ("on_validation", on_validation)):
            if heard is not None and not callable(heard):
                expected = "a function of a step and its metrics"
                raise ConfigError(explain(name, repr(heard), expected, "give one, or leave it out"))
        words = [overrides] if isinstance(overrides, str) else overrides
        self.config = cli.resolve_config(options, words)
        """The checked options, with which `config.yaml` is written."""
        self._objects = given.objects
        self._heard = Recorder(on_step, on_validation)
        refuse_unpicklable(travelling)

    @property
    def history(self) -> History:
        """What the last call of `train` has logged so far, also where it ended in an error."""
        folder = Path(self.config.trainer.default_local_dir)
        model = folder / "model"
        is_whole = (model / "config.json").is_file()
        return History(tuple(self._heard.rows), folders.latest(folder), model if is_whole else None)

    def train(self) -> History:
        """Run to the end. Raises UserError; what is finished was saved, as `search-r1 train` does.

        It blocks, in a notebook too; an interrupt saves and raises `Interrupted`.
        """
        refuse_running_ray()
        start_logging(logging.INFO)
        logging.getLogger("httpx").setLevel(logging.WARNING)
        from verl.trainer.run import run  # noqa: PLC0415 - torch, Ray, transformers: seconds

        self._heard.rows.clear()
        with self._served() as config, plugins.registered(self._objects):
            run(config, [self._heard])
        return self.history

    @contextlib.contextmanager
    def _served(self) -> Iterator[Config]:
        """The options, with the address of the server that was given."""
        if self._server is None:
            yield self.config
            return
        with self._server as server:
            retriever = replace(self.config.retriever, url=f"{server.url}/retrieve")
            yield replace(self.config, retriever=retriever)


class Recorder(Tracker):
    """Keeps what is logged, and tells the callbacks. An error of theirs ends the run, saved."""

    def __init__(self, on_step: Listener | None, on_validation: Listener | None) -> None:
        self.rows: list[Mapping[str, float]] = []
        self._on_step, self._on_validation = on_step, on_validation

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append({"step": step, **metrics})
        scores = {name: v for name, v in metrics.items() if name.startswith(OF_VALIDATION)}
        if len(scores) < len(metrics):
            _tell("on_step", self._on_step, step, metrics)
        if scores:
            _tell("on_validation", self._on_validation, step, scores)

    def rewind(self, step: int | None) -> None:
        self.rows = [row for row in self.rows if step is not None and row["step"] <= step]


def _tell(name: str, listener: Listener | None, step: int, metrics: Mapping[str, float]) -> None:
    if listener is not None:
        with plugins.user_code_errors(name, f"step {step}", "a callback that returns", PluginError):
            listener(step, dict(metrics))


def refuse_running_ray() -> None:
    """Raise ConfigError where this process is a driver already: a run has Ray to itself."""
    ray: Any = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        fix = "ray.shutdown() before; a running cluster is named by RAY_ADDRESS"
        raise ConfigError(explain("ray", "a session of this process", "none", fix))


def refuse_unpicklable(objects: Mapping[str, Any]) -> None:
    """Raise ConfigError for what cannot be sent to other processes."""
    if not objects:
        return
    from ray import cloudpickle  # noqa: PLC0415 - a second

    expected = "what cloudpickle takes: no locks, connections or open files"
    fix = "make them in the call, or give the class, which each process calls for itself"
    for name, one in objects.items():
        with plugins.user_code_errors("object", name, expected, fix=fix):
            cloudpickle.dumps(one)
