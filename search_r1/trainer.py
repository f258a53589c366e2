"""The Python API for training: typed configuration, custom objects, callbacks and history.

A run has the same checks, files and checkpoints as with `search-r1 train`, so that either can
resume what the other began. User errors raise `verl.errors.UserError`; see
docs/reference/python.md.
"""

import contextlib
import copy
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from search_r1.python_objects import AgentLike, PythonObjects, RetrieverLike, ToolLike
from search_r1.retrieval.local_server import LocalServer
from search_r1.rewards import RewardInput, RewardOutput
from verl import plugins
from verl.config import Config, cli
from verl.errors import ConfigError, PluginError, explain
from verl.logs import start_logging
from verl.monitor.tracking import Tracker
from verl.rewards.interface import RewardManager

Callback = Callable[[int, Mapping[str, float]], object]
"""A function of a step and its metrics; its return value is ignored."""
RewardLike = Callable[[RewardInput], float | RewardOutput] | RewardManager | type[RewardManager]
VALIDATION_PREFIX = "val/"


@dataclass(frozen=True)
class History:
    """Metrics and outputs of a run."""

    steps: tuple[Mapping[str, float], ...]
    """The rows of `metrics.jsonl` that this call wrote: `step` and the metrics of that step."""
    checkpoint: Path | None
    """Folder of the last checkpoint, if there is one."""
    model: Path | None
    """Hugging Face folder of the trained policy, once the run has finished."""


class Trainer:
    """One training run; calling `train` again is like running the command again."""

    def __init__(
        self,
        config: Config | Sequence[str],
        *,
        agent: str | AgentLike | None = None,
        tools: Sequence[str | ToolLike] | None = None,
        reward: str | RewardLike | None = None,
        retriever: str | RetrieverLike | None = None,
        on_step: Callback | None = None,
        on_validation: Callback | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        """Resolve and check the configuration. Raises ConfigError.

        `config` is a `Config`, which is copied, or the words of a command line; `overrides`, each
        `key=value`, take precedence. `agent`, `tools`, `reward` and `retriever` are names or
        objects that replace `agent.name`, `agent.tools`, `reward_model.name` and `retriever.url`.
        Classes and functions for agents and tools are called with the run's options in each process
        that needs one; objects are pickled to these processes. Rewards and callbacks stay in this
        process. A `LocalServer` runs as long as the training.
        """
        options = copy.deepcopy(config) if isinstance(config, Config) else cli.compose(config)
        passed = PythonObjects()
        self._server = None
        if agent is not None:
            options.agent.name = passed.name("agent.name", agent, "run")
        if tools is not None:
            options.agent.tools = passed.tools("agent.tools", tools)
        if isinstance(retriever, LocalServer):
            self._server = retriever
        elif retriever is not None:
            options.retriever.url = passed.retriever(retriever)
        pickled = dict(passed.objects)  # all but the reward, which stays in this process
        if reward is not None:
            options.reward_model.name = passed.reward(reward)
        for name, callback in (("on_step", on_step), ("on_validation", on_validation)):
            if callback is not None and not callable(callback):
                expected = "a function of a step and its metrics"
                fix = "give one, or leave it out"
                raise ConfigError(explain(name, repr(callback), expected, fix))
        words = [overrides] if isinstance(overrides, str) else overrides
        self.config = cli.resolve_config(options, words)
        """The checked configuration, as written to `config.yaml`."""
        self._objects = passed.objects
        self._recorder = CallbackTracker(on_step, on_validation)
        refuse_unpicklable(pickled)

    @property
    def history(self) -> History:
        """Metrics and outputs of the last call of `train` so far, even if it raised an error."""
        from verl.checkpoint import folders  # noqa: PLC0415 - torch: seconds

        folder = Path(self.config.trainer.default_local_dir)
        model = folder / "model"
        is_complete = (model / "config.json").is_file()
        rows = tuple(self._recorder.rows)
        return History(rows, folders.latest(folder), model if is_complete else None)

    def train(self) -> History:
        """Run the training to its end. Raises UserError, with finished steps saved.

        Blocks, in a notebook too; an interrupt saves a checkpoint and raises `Interrupted`.
        """
        refuse_running_ray()
        start_logging(logging.INFO)
        logging.getLogger("httpx").setLevel(logging.WARNING)
        from verl.trainer.run import run  # noqa: PLC0415 - torch, Ray, transformers: seconds

        self._recorder.rows.clear()
        with self._running_server() as config, plugins.registered(self._objects):
            run(config, [self._recorder])
        return self.history

    @contextlib.contextmanager
    def _running_server(self) -> Iterator[Config]:
        """Run the passed server, if any, and yield the configuration with its address."""
        if self._server is None:
            yield self.config
            return
        with self._server as server:
            retriever = replace(self.config.retriever, url=f"{server.url}/retrieve")
            yield replace(self.config, retriever=retriever)


class CallbackTracker(Tracker):
    """Keeps the logged metrics and calls the callbacks, whose errors save and end the run."""

    def __init__(self, on_step: Callback | None, on_validation: Callback | None) -> None:
        self.rows: list[Mapping[str, float]] = []
        self._on_step, self._on_validation = on_step, on_validation

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append({"step": step, **metrics})
        scores = {name: v for name, v in metrics.items() if name.startswith(VALIDATION_PREFIX)}
        if len(scores) < len(metrics):
            _call("on_step", self._on_step, step, metrics)
        if scores:
            _call("on_validation", self._on_validation, step, scores)

    def rewind(self, step: int | None) -> None:
        self.rows = [row for row in self.rows if step is not None and row["step"] <= step]


def _call(name: str, callback: Callback | None, step: int, metrics: Mapping[str, float]) -> None:
    if callback is not None:
        with plugins.user_code_errors(name, f"step {step}", "a callback that returns", PluginError):
            callback(step, dict(metrics))


def refuse_running_ray() -> None:
    """Raise ConfigError if this process already has a Ray session: a run needs its own."""
    ray: Any = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        fix = "call ray.shutdown() first; to use a running cluster, set RAY_ADDRESS"
        raise ConfigError(explain("ray", "a session of this process", "none", fix))


def refuse_unpicklable(objects: Mapping[str, Any]) -> None:
    """Raise ConfigError for objects that cannot be sent to other processes."""
    if not objects:
        return
    from ray import cloudpickle  # noqa: PLC0415 - takes a second to import

    expected = "an object that cloudpickle accepts: no locks, connections or open files"
    fix = "create them in the call, or give the class, which each process calls for itself"
    for name, value in objects.items():
        with plugins.user_code_errors("object", name, expected, fix=fix):
            cloudpickle.dumps(value)
