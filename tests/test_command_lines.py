"""Invalid command lines: each ends with a message and status 2, none with a traceback."""

import contextlib
import dataclasses
import io
import random
import re
import runpy
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from search_r1 import infer, mcp_server, options, serve
from search_r1.datasets import command as data
from search_r1.datasets import download
from search_r1.evaluation import __main__ as evaluate
from search_r1.evaluation.options import CompareOptions, EvaluationOptions, TableOptions
from search_r1.experimental.replay import command as replay
from search_r1.infer import InferOptions
from search_r1.retrieval import command as serve_retriever
from search_r1.retrieval import index_builder
from search_r1.retrieval.index_builder import BuildConfig
from search_r1.retrieval.settings import ServerOptions
from search_r1.serve import ServingOptions
from search_r1.view import command as view
from tests.verl.config.test_cli import REQUIRED
from verl.ext.sft import candidates, rejection_sampling
from verl.ext.sft import trainer as sft
from verl.ext.sft.options import SftConfig
from verl.trainer import main_ppo

Main = Callable[[list[str]], int | None]
COMMANDS: dict[str, tuple[Main, list[str], type]] = {
    "evaluate": (evaluate.main, ["run", "--model=m", "--data=d", "--out=o"], EvaluationOptions),
    "compare": (evaluate.main, ["compare", "a", "b"], CompareOptions),
    "table": (evaluate.main, ["table", "a"], TableOptions),
    "infer": (infer.main, ["q"], InferOptions),
    "serve": (serve.main, [], ServingOptions),
    "view": (view.main, ["run"], view.ViewOptions),
    "replay": (replay.main, ["run", "--trajectory=1"], replay.ReplayOptions),
    "mcp": (mcp_server.main, [], mcp_server.McpOptions),
    "serve-retriever": (serve_retriever.main, [], ServerOptions),
    "index": (index_builder.main, ["--corpus_path=c", "--save_dir=s"], BuildConfig),
    "download": (download.main, ["e5"], download.DownloadOptions),
    "rejection_sampling": (
        rejection_sampling.main, ["--rollouts=r", "--out=o"], rejection_sampling.Options,
    ),
    **{f"data {name}": (data.main, [name], kind) for name, (kind, _, _) in data.RECIPES.items()},
}  # fmt: skip
WORDS = (
    "",
    "x",
    "nan",
    "-1",
    "1e999",
    "9" * 30,
    "\u2603",
    "a\nb",
    "--",
    "None",
    "-",
    "\ud800",
    "{",
)
TYPED = (
    *WORDS, "9" * 10_000, "[" * 600, "null", "[1]", "{a: 1}", "[]", "{}", "'", '"', "${x}", "${",
    "${oc.env:HOME}", "a,b", "range(1,3)", "\0", "=", "\\", "???", "*x", "%", ": :",
)  # fmt: skip
INVALID = (
    "", "=", "=1", "x", "x=1", ".=1", "data=1", "data=null", "data.x=1", "~data", "+++a=1", "[=1",
    "trainer=ppo", "hydra.run.dir=x", "--cfg", "--cfg=x", "--config-name=nope", "--config-dir=/no",
    "-x", "trainer.seed", "trainer.seed==1", "trainer..seed=1", "trainer.seed.x=1", "\ud800=1",
    "reward_model.stages=[1]", "reward_model.stages=[{nope: 1}]", "reward_model.weights={em: x}",
    "trainer.logger={a: b}", "trainer.logger=null", "agent.tools=search", "data.train_files=3",
    "data.train_files=[]", "compat=nope", "compat=[1]", "+hardware=nope", "x" * 10_000 + "=1",
    "critic.optim.betas=[0.9]", "actor_rollout_ref.model.target_modules=3",
)  # fmt: skip
"""Arguments that a training run always refuses."""
PROGRAM_FOLDERS = ("verl", "search_r1", "scripts", "benchmarks", "example")
"""Folders whose files can be started as programs."""


class FakeModule:
    """A module whose functions all do nothing."""

    def __getattr__(self, name: str) -> Callable[[object], int]:
        return lambda options: 0


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Command lines are parsed but not carried out."""
    imports = types.SimpleNamespace(import_module=lambda name: FakeModule())
    monkeypatch.setattr(options, "importlib", imports)
    for name in ("verl.trainer.run", "verl.ext.sft.run"):
        monkeypatch.setitem(sys.modules, name, FakeModule())  # type: ignore[arg-type]
    report = candidates.Report()
    for module, name, result in (
        (index_builder, "build_index", None),
        (download, "_download", None),
        (candidates, "run", report),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *_, result=result, **__: result)


def status(main: Main, words: Sequence[str]) -> int:
    """Return the exit status of a command line; checks that a refusal has a message on stderr."""
    stderr = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True)
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(list(words)) or 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    text = stderr.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert "Traceback" not in text
    assert code != 2 or text.strip(), words
    return code


def flags(kind: type) -> Iterator[str]:
    """Yield every flag of a dataclass of options, including those of nested groups."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from flags(hints[field.name])
        else:
            yield f"--{field.name}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_handles_every_value(command: str) -> None:
    """Wrong types, missing values, repeated flags: status 0 or 2, the latter with a message."""
    main, base, kind = COMMANDS[command]
    cases = [["--"], [""], ["\ud800"], [*base, "--no-such-flag"], [*base, "--no-such-flag=3"]]
    for flag in flags(kind):
        cases += [[*base, flag], [*base, flag, "1", flag, "2"], [*base, f"{flag}=1=2"]]
        cases += [[*base, flag, word] for word in WORDS]
    for words in random.Random(0).sample(cases, min(20, len(cases))):
        assert status(main, words) in (0, 2), words


def test_every_option_of_a_run_handles_every_value() -> None:
    """Options of every type, also nullable ones, accept or refuse any value without a traceback."""
    keys = ("trainer.seed", "critic.optim.lr", "trainer.project_name", "agent.tools",
            "trainer.time_limit", "reward_model.weights", "trainer.val_only")  # fmt: skip
    cases = [f"{key}={word}" for key in keys for word in TYPED]
    for word in random.Random(0).sample(cases, 20):
        assert status(main_ppo.main, [*REQUIRED, word]) in (0, 2), word


@pytest.mark.parametrize("word", INVALID)
def test_an_invalid_argument_of_a_run_is_refused(word: str) -> None:
    """An unknown option or an invalid value ends with status 2."""
    assert status(main_ppo.main, [*REQUIRED, word]) == 2


def test_supervised_training_handles_every_value() -> None:
    """Its values are YAML, whose parser raises many types of errors."""
    base = ["model_path=m", "train_file=t", "output_dir=o"]
    cases = [f"{field.name}={word}" for field in dataclasses.fields(SftConfig) for word in TYPED]
    for word in (*INVALID[:8], *random.Random(0).sample(cases, 60)):
        assert status(sft.main, [*base, word]) in (0, 2), word


@pytest.mark.parametrize("module", ["verl.trainer.sft", "verl.trainer.rejection_sampling"])
def test_an_old_module_path_returns_the_status(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old module path returns the exit status of the command."""
    monkeypatch.setattr(sys, "argv", [module, "nonsense=1"])
    with pytest.raises(SystemExit) as error:
        runpy.run_module(module, run_name="__main__")
    assert error.value.code == 2


def test_no_program_drops_its_status() -> None:
    """A file that ends with a bare `main()` defines a `main` that returns nothing."""
    root = Path(__file__).parents[1]
    files = [
        *root.glob("*.py"),
        *(f for folder in PROGRAM_FOLDERS for f in (root / folder).rglob("*.py")),
    ]
    texts = {file: file.read_text() for file in files}
    bare = {file: text for file, text in texts.items() if re.search(r"^    main\(\)$", text, re.M)}
    assert bare
    assert [file for file, text in bare.items() if "def main() -> None:" not in text] == []
