"""The Python API for training: configuration checks, passed objects, callbacks."""

import asyncio
import logging
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from ray import cloudpickle

from example.tools.calculator import Calculator
from search_r1 import Config, Trainer
from search_r1.agent.generation import build_agent, build_environment
from search_r1.python_objects import PythonObjects
from search_r1.retrieval.in_memory import InMemoryRetrieval
from search_r1.retrieval.schema import Document
from search_r1.rewards import RewardInput, RewardOutput
from search_r1.scoring import build_reward_manager
from verl import plugins
from verl.agent.interface import Item, Observation, Tool, text_arguments
from verl.config import cli
from verl.errors import ConfigError, PluginError
from verl.ext.resume import identity
from verl.monitor.tracking import Tracker, Tracking
from verl.rewards.interface import Reward, RewardManager
from verl.trainer import run
from verl.types import Trajectory

OSLO = Document.from_title("7", "Oslo", "The capital of Norway.")


def config(folder: Path | str = "run") -> Config:
    """Return a complete configuration."""
    options = Config()
    options.data.train_files = options.data.val_files = "rows.parquet"
    options.actor_rollout_ref.model.path = "model"
    options.trainer.default_local_dir = str(folder)
    return options


def brevity(dialogue: RewardInput) -> float:
    """Score a dialogue; a reward function defined in a file."""
    return 1.0 / (1 + len(dialogue.policy_texts))


class Shout(Tool):
    """A tool whose constructor needs an argument."""

    name = "shout"
    parameters = text_arguments(text="what")

    def __init__(self, end: str) -> None:
        self.end = end

    async def call(self, *, text: str) -> Observation:  # type: ignore[override]
        return Observation((Item(text.upper() + self.end),))


def logging_run(*steps: tuple[dict[str, float], int]) -> object:
    """Return a replacement for a run that logs these steps."""

    def stand_in(config: Config, trackers: Sequence[Tracker]) -> None:
        with Tracking.from_config(config, trackers) as tracking:
            for metrics, step in steps:
                tracking.log(metrics, step)

    return stand_in


def test_the_import_is_light_and_each_name_is_there() -> None:
    """`import search_r1` imports neither torch nor Ray; no module hides a function of the API."""
    code = (
        "import sys, search_r1; heavy = {'torch', 'ray', 'hydra', 'transformers', 'pydantic'}; "
        "print(heavy & set(sys.modules)); search_r1.Config; print(heavy & set(sys.modules)); "
        "import search_r1.cli; print(set(search_r1.__all__) <= set(dir(search_r1)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\nset()\nTrue\n"


def test_options_are_those_of_the_command_line(tmp_path: Path) -> None:
    """Attributes and command-line words give equal configurations, derived defaults included."""
    own = config(tmp_path)
    own.algorithm.adv_estimator = "grpo"
    own.actor_rollout_ref.rollout.n_agent = 5
    own.data.train_files = Path("rows.parquet")
    words = ["data.train_files=rows.parquet", "data.val_files=rows.parquet",
             "actor_rollout_ref.model.path=model", f"trainer.default_local_dir={tmp_path}",
             "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n_agent=5"]  # fmt: skip
    made = Trainer(own)
    assert made.config == Trainer(words).config == cli.compose(words)
    assert own.data.train_files == Path("rows.parquet")  # the caller's configuration is unchanged
    more = ["+trainer.seed=3", "compat=search_r1", "trainer.logger=[jsonl]"]
    assert Trainer(own, overrides=more).config == cli.compose([*words, *more])
    with pytest.raises(ConfigError, match=r"trainer\.seed"):
        Trainer(own, overrides=["trainer.sed=3"])


@pytest.mark.parametrize(
    ("section", "name", "value", "message"),
    [
        ("data", "train_fles", "x", r"data\.train_fles.*did you mean data\.train_files"),
        ("trainer", "seed", "three", r"trainer\.seed: got 'three', expected int; fix: "),
        ("trainer", "total_training_steps", 0, r"total_training_steps: got 0, expected 1 or more"),
        ("data", "val_files", "???", r"data\.val_files: got nothing"),
        ("trainer", "experiment_name", "${no.such}", "no"),
        ("algorithm", "adv_estimator", "grop", "one of gae, grpo"),
        ("agent", "tools", ["python:Gone"], None),
    ],
)
def test_what_cannot_be_is_told_in_one_line(
    section: str, name: str, value: object, message: str | None
) -> None:
    """Errors are one line, raised by the Trainer, or when the tools are built."""
    own = config()
    setattr(getattr(own, section), name, value)
    if message is None:
        made = Trainer(own)
        with pytest.raises(ConfigError):
            build_environment(made.config)
        return
    with pytest.raises(ConfigError, match=message) as error:
        Trainer(own)
    assert "\n" not in str(error.value)


def test_code_of_a_file_has_the_name_that_a_command_line_gives_it(tmp_path: Path) -> None:
    """Classes and functions in files get command-line names, and the file is not run again."""
    (tmp_path / "rows.parquet").write_bytes(b"rows")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    own = config(tmp_path)
    own.data.train_files = own.data.val_files = str(tmp_path / "rows.parquet")
    own.actor_rollout_ref.model.path = str(tmp_path / "model")
    made = Trainer(own, tools=["search", Calculator], reward=brevity)
    words = [f"data.train_files={tmp_path}/rows.parquet", f"data.val_files={tmp_path}/rows.parquet",
             f"actor_rollout_ref.model.path={tmp_path}/model",
             f"trainer.default_local_dir={tmp_path}",
             "agent.tools=[search,example/tools/calculator.py:Calculator]",
             "reward_model.name=tests/test_trainer.py:brevity"]  # fmt: skip
    assert identity(made.config, {}) == identity(cli.compose(words), {})
    with plugins.registered(made._objects):
        assert type(build_environment(made.config).tools[1]) is Calculator


def test_objects_reach_other_processes(tmp_path: Path) -> None:
    """An unpickled factory builds the tools from copies of the passed objects."""
    retriever = InMemoryRetrieval({"capital of Norway": [OSLO]})
    own = config(tmp_path)
    own.agent.name = "dialogue"
    made = Trainer(own, tools=["search", Shout("!")], retriever=retriever)
    assert made.config.agent.tools == ["search", "python:Shout"]
    with plugins.registered(made._objects):
        sent = cloudpickle.dumps(plugins.PortableFactory(build_environment))
    assert plugins.registered_object("python:Shout") is None
    try:
        search, shout = pickle.loads(sent)(made.config).tools
        observation = asyncio.run(search.call(query="capital of Norway"))
        assert observation.items[0].source == OSLO and search.preflight(1.0) is not None
        assert asyncio.run(shout.call(text="oslo")).items[0].text == "OSLO!"
        assert retriever.queries == [] and search.retrieval.queries == ["capital of Norway"]
    finally:
        plugins._registered.clear()


def test_a_function_may_find_documents(tmp_path: Path) -> None:
    """A search function may return plain texts, and may block."""
    made = Trainer(config(tmp_path), retriever=lambda query: [f"About {query}\nIt is so."])
    with plugins.registered(made._objects):
        [search] = build_environment(made.config).tools
    [item] = asyncio.run(search.call(query="Oslo")).items
    assert (item.title, item.text) == ("About Oslo", "It is so.")


def test_objects_of_one_name_get_different_names() -> None:
    """A number is added to a name that is taken, and to one that has that number already."""
    functions = [type(name, (Shout,), {})("!") for name in ("F", "F_3", "F")]
    passed = PythonObjects()
    names = passed.tools("tools", functions)
    assert names == ["python:F", "python:F_3", "python:F_2"]
    assert passed.tools("tools", [*functions]) == ["python:F_4", "python:F_3_2", "python:F_5"]
    assert len(passed.objects) == 6


class OwnRetrieval(InMemoryRetrieval):
    """A retriever that is built from a run's options."""

    def __init__(self, options: Config) -> None:
        super().__init__([OSLO], options.retriever.topk)


def test_a_class_may_find_documents(tmp_path: Path) -> None:
    """A retriever class is called with the options, and never named by its file."""
    made = Trainer(config(tmp_path), retriever=OwnRetrieval, tools=["search", "visit"])
    assert made.config.retriever.url == "python:OwnRetrieval"
    with plugins.registered(made._objects):
        search, visit = build_environment(made.config).tools
    assert asyncio.run(search.call(query="Norway")).items[0].source == OSLO
    assert "no documents" in asyncio.run(visit.call(target="7")).items[0].text


def test_what_is_no_callback_is_refused_before_any_step(tmp_path: Path) -> None:
    """A callback that is not callable is refused by the Trainer."""
    with pytest.raises(ConfigError, match=r"^on_step: got 3"):
        Trainer(config(tmp_path), on_step=3)  # type: ignore[arg-type]
    assert Trainer(config(tmp_path), overrides="trainer.seed=1").config.trainer.seed == 1


def test_one_tool_needs_no_list(tmp_path: Path) -> None:
    """A single tool is accepted as a name or an object."""
    assert Trainer(config(tmp_path), tools="visit").config.agent.tools == ["visit"]
    made = Trainer(config(tmp_path), tools=Calculator)  # type: ignore[arg-type]
    assert made.config.agent.tools == ["example/tools/calculator.py:Calculator"]


def test_a_tool_given_twice_is_refused_and_two_of_a_kind_are_not(tmp_path: Path) -> None:
    """The same tool twice is refused; two objects of one class get different names."""
    made = Trainer(config(tmp_path), tools=[Calculator, Calculator])
    with plugins.registered(made._objects), pytest.raises(ConfigError):
        build_environment(made.config)
    whisper = Shout(".")
    whisper.name = "whisper"
    made = Trainer(config(tmp_path), tools=[Shout("!"), whisper])
    with plugins.registered(made._objects):
        assert [tool.name for tool in build_environment(made.config).tools] == ["shout", "whisper"]


class Agent:
    """An agent that does nothing."""

    async def run(self, start: Trajectory, engine: object, sampling: object) -> Trajectory:
        return start


def test_an_agent_is_an_object_or_a_factory(tmp_path: Path) -> None:
    """An agent is passed as an object, or as a function of the options."""
    agent = Agent()
    made = Trainer(config(tmp_path), agent=agent)
    with plugins.registered(made._objects):
        assert build_agent(made.config) is agent
    made = Trainer(config(tmp_path), agent=lambda options: agent)
    with plugins.registered(made._objects):
        assert build_agent(made.config) is agent


class Constant(RewardManager):
    """A reward manager with a constant score."""

    def __init__(self, options: Config | None = None) -> None:
        self.options = options

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Reward]:
        return [Reward(1.0) for _ in trajectories]


def test_a_reward_is_a_function_or_a_manager(tmp_path: Path) -> None:
    """A reward is passed as a function, a manager, or a manager's class."""
    manager = Constant()
    made = Trainer(config(tmp_path), reward=manager)
    with plugins.registered(made._objects):
        assert build_reward_manager(made.config) is manager
    made = Trainer(config(tmp_path), reward=Constant)
    with plugins.registered(made._objects):
        built = build_reward_manager(made.config)
    assert isinstance(built, Constant) and built.options is made.config
    made = Trainer(config(tmp_path), reward=lambda dialogue: RewardOutput(2.0))
    with plugins.registered(made._objects):
        assert callable(build_reward_manager(made.config))

    async def later(dialogue: RewardInput) -> float:
        return 0.0

    made = Trainer(config(tmp_path), reward=later)
    with plugins.registered(made._objects), pytest.raises(ConfigError, match="never awaited"):
        build_reward_manager(made.config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"tools": [Shout(threading.Lock())]},
            "python:Shout.*pickle.*that cloudpickle accepts",
        ),
        ({"tools": [3]}, r"agent\.tools: got 3, expected a name, a class, or an object with"),
        ({"agent": object()}, r"agent\.name: got .*an object with run"),
        ({"retriever": 3}, r"retriever\.url: got 3"),
        ({"reward": 3}, r"reward_model\.name: got 3"),
    ],
)
def test_what_cannot_travel_or_act_is_refused(arguments: dict[str, object], message: str) -> None:
    """Objects that cannot be pickled, or have a wrong type, are refused by the Trainer."""
    with pytest.raises(ConfigError, match=message):
        Trainer(config(), **arguments)  # type: ignore[arg-type]


def test_callbacks_hear_each_step_and_the_history_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`on_step` gets training steps, `on_validation` validation scores; the history has both."""
    first, second = {"val/em": 0.25}, {"actor/lr": 1.0, "val/em": 0.5}
    monkeypatch.setattr(run, "run", logging_run((first, 0), ({"actor/lr": 1.0}, 1), (second, 2)))
    steps: list[tuple[int, Mapping[str, float]]] = []
    scores: list[tuple[int, Mapping[str, float]]] = []
    made = Trainer(
        config(tmp_path),
        on_step=lambda step, metrics: steps.append((step, metrics)),
        on_validation=lambda step, metrics: scores.append((step, metrics)),
    )
    history = made.train()
    assert steps == [(1, {"actor/lr": 1.0}), (2, second)]
    assert scores == [(0, first), (2, {"val/em": 0.5})]
    assert [row["step"] for row in history.steps] == [0, 1, 2]
    assert history.steps[2] == {"step": 2, **second}
    assert (history.checkpoint, history.model) == (None, None)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_callback_that_fails_ends_the_run_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in a callback is reported as the user's code, and the history is kept."""
    monkeypatch.setattr(run, "run", logging_run(({"actor/lr": 1.0}, 1)))
    made = Trainer(config(tmp_path), on_step=lambda step, metrics: metrics["no"])
    with pytest.raises(PluginError, match=r"on_step: got step 1 \(KeyError: 'no'; line \d+ of .*"):
        made.train()
    assert [row["step"] for row in made.history.steps] == [1]


def test_a_program_with_a_ray_session_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An existing Ray session is reported before `ray.init` would fail."""
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=r"fix: call ray\.shutdown\(\)"):
        Trainer(config(tmp_path)).train()
    logging.getLogger("httpx").setLevel(logging.NOTSET)
