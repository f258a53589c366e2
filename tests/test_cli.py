"""The command `search-r1`: fast to start, and the same code as the old entry points."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from search_r1 import cli
from search_r1.datasets.command import RECIPES

ROOT = Path(cli.__file__).parents[1]
HEAVY = ("torch", "transformers", "ray", "vllm", "datasets", "pandas")
RUN_COMMANDS = """
import sys, time
from search_r1.cli import main
for command in sys.argv[1].split(";"):
    start = time.process_time()
    try:
        status = main(command.split())
    except SystemExit as error:
        status = error.code
    assert status in (0, 2), (command, status)
    heavy = [name for name in %r if name in sys.modules]
    assert not heavy, (command, heavy)
    assert time.process_time() - start < 2.0, (command, time.process_time() - start)
    print("status", status, flush=True)
sys.exit(status)
"""
"""Runs commands in a child process that may import nothing heavy; measured at 0.6 s of CPU."""
FLAG = re.compile(r"^(?:│ |  )(--?[a-z][a-z-]*|[a-z_]+=)", re.MULTILINE)
"""A flag, or an option of supervised training, at the beginning of its line of help."""
TYPO = "--no-such-flag 1"
COMMANDS = {
    **{name: "" for name in cli.COMMANDS if name != "checkpoint"},  # it only has subcommands
    "replay": "a-run",
    "push": "a-run",
    "evaluate run": "",
    "evaluate compare": "a-folder another",
    "checkpoint export": "a-folder --out another",
    **dict.fromkeys((f"data {name}" for name in RECIPES), ""),
}
"""All commands with subcommands; each with the arguments without which it does not start."""


def run(*commands: str, heavy: tuple[str, ...] = HEAVY) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", RUN_COMMANDS % (heavy,), ";".join(commands)]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)


def texts_of(*commands: str) -> list[str]:
    """Return what commands print that succeed and import nothing heavy."""
    done = run(*commands)
    *texts, rest = done.stdout.split("status 0\n")
    assert (len(texts), rest) == (len(commands), ""), done.stderr
    return texts


def test_help_is_printed_at_once_with_at_most_twenty_flags() -> None:
    """Of every command and recipe, with its usage; --help-all has the flags that --help leaves out.

    The list of commands has a line for each, and the list of recipes too.
    """
    long = ("index", "infer", "serve", "serve-retriever", "evaluate run")
    asked = {name: f"{name} --help" for name in ("", *COMMANDS)}
    asked |= {f"{name} --help-all": f"{name} --help-all" for name in long}
    texts = dict(zip(asked, texts_of(*asked.values()), strict=True))
    assert all(f"\n  {name} " in texts[""] for name in cli.COMMANDS)
    assert all(name in texts["data"] for name in RECIPES)
    for name in set(COMMANDS) - {"data"}:
        module = cli.COMMANDS[name.split()[0]][0]
        program = f"search-r1 {name}" if module.startswith("search_r1") else "python"
        assert texts[name].startswith(f"usage: {program}"), name
        assert len(FLAG.findall(texts[name])) <= 20, name
    for name in long:
        shown, whole = (set(FLAG.findall(texts[key])) for key in (name, f"{name} --help-all"))
        assert "--help-all" in texts[name] and len(whole) > 20 and shown <= whole, name


def test_mistakes_are_answered_at_once() -> None:
    """A mistyped option is named before anything heavy is imported."""
    done = run(*(f"{name} {arguments} {TYPO}" for name, arguments in COMMANDS.items()))
    assert done.stdout.count("status 2\n") == len(COMMANDS), done.stderr
    assert done.stderr.count("no-such-flag") == len(COMMANDS), done.stderr


def test_what_is_missing_is_named_at_once(tmp_path: Path) -> None:
    """So are a retriever, a model, a run and a corpus that are not there."""
    model = "--model models/none --retriever-url empty"
    away = "--model example/policy --retriever-url http://127.0.0.1:9"
    data = f"evaluate --data example/data/val.parquet --out {tmp_path}/out"
    commands = (
        f"infer who? {away}", f"infer who? {model}", f"serve {away}", f"serve {model}",
        f"{data} {away}", f"{data} {model}", "view runs/none", "replay runs/none --trajectory 1:0",
        f"index --corpus-path none.jsonl --retrieval-method bm25 --save-dir {tmp_path}/index",
    )  # fmt: skip
    done = run(*commands, heavy=HEAVY[:-1])  # pandas reads the questions of an evaluation
    assert done.stdout.count("status 2\n") == len(commands), done.stderr
    assert done.stderr.count("does not answer (ConnectError") == 3, done.stderr
    assert done.stderr.count("models/none: got no such folder") == 3, done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("evalute", "fix: did you mean evaluate?"),
        ("plan --cards 8", "docs/guides/rollouts.md"),  # it fell
        ("credit a-run", "search-r1 replay"),
        ("serve-retriever --compile_encoder", "--encoder_dtype"),
        ("data nq_rag --topk 0", "--topk: got 0"),
    ],
)
def test_the_answer_names_the_mistake(
    words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped command, a fallen one, and a number out of bounds."""
    try:
        assert cli.main(words.split()) == 2
    except SystemExit as error:
        assert error.code == 2
    assert expected in capsys.readouterr().err
    assert not set(cli.FALLEN) & set(cli.COMMANDS)


def test_a_deleted_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a package of ours: one that is not installed is an error like any other."""
    monkeypatch.setitem(cli.COMMANDS, "replay", ("search_r1.gone.replay.command", "experimental"))
    assert cli.main(["replay", "run"]) == 2
    assert "search_r1.gone" in capsys.readouterr().err
    monkeypatch.setitem(cli.COMMANDS, "replay", ("no_such_package", ""))
    monkeypatch.setattr(importlib, "import_module", lambda _: __import__("another_package"))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["replay", "run"])


def test_hydra_commands_get_their_arguments_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """`train` and `sft` parse their Hydra overrides themselves."""
    import verl.ext.sft.trainer  # noqa: PLC0415
    import verl.trainer.main_ppo  # noqa: PLC0415

    got: list[object] = []
    for module in (verl.ext.sft.trainer, verl.trainer.main_ppo):
        monkeypatch.setattr(module, "main", lambda words: got.append(words) or 7)
    assert cli.main(["train", "--cfg", "job", "data.train_files=a b"]) == 7
    assert cli.main(["sft", "+x.y=1"]) == 7
    assert got == [["--cfg", "job", "data.train_files=a b"], ["+x.y=1"]]


def test_every_command_has_a_module() -> None:
    """The module of each command has a function `main`."""
    for module, _ in cli.COMMANDS.values():
        file = ROOT / f"{module.replace('.', '/')}.py"
        text = file.read_text(encoding="utf-8")
        assert "\ndef main(" in text or "\nmain = " in text, module


def test_a_wheel_answers_outside_the_checkout(tmp_path: Path) -> None:
    """It has no top-level `example`; its commands need none, and write the one that is trained."""
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    command = [sys.executable, "-c", build]
    source = tmp_path / "source"
    for name in (
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
        "verl",
        "search_r1",
        "example",
    ):
        target = source / name
        target.parent.mkdir(exist_ok=True)
        target.symlink_to(ROOT / name)
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    tops = {path.name for path in (tmp_path / "site").iterdir() if "dist-info" not in path.name}
    assert tops == {"verl", "search_r1", "search_r1_task", "searchr1"}
    assert (tmp_path / "site" / "searchr1" / "trainer.py").is_file()
    assert not (tmp_path / "site" / "search_r1" / "compat").exists()
    (entry,) = (tmp_path / "site").glob("*.dist-info/entry_points.txt")
    assert "search-r1 = search_r1.cli:main" in entry.read_text()
    clean = tmp_path / "clean"
    clean.mkdir()
    environment = {"PYTHONPATH": str(tmp_path / "site")}
    for words, status, expected in (
        ("infer --help", 0, "--retriever-url"),
        ("example", 0, "search-r1 train --config-dir example --config-name tiny"),
        ("example", 2, "folder example: got"),  # it may have been changed by its user
        ("train --config-dir example --config-name tiny --cfg job", 0, "path: example/policy"),
    ):
        program = [sys.executable, "-m", "search_r1.cli", *words.split()]
        result = subprocess.run(program, cwd=clean, capture_output=True, text=True, env=environment)
        assert result.returncode == status, result.stderr
        assert expected in result.stdout + result.stderr
    for written in (path for path in clean.rglob("*") if path.is_file()):
        assert written.read_bytes() == (ROOT / written.relative_to(clean)).read_bytes()
    assert (clean / "example" / "policy" / "model.safetensors").is_file()
    assert wheel.stat().st_size < 15e6


@pytest.mark.parametrize("command", ["infer --help", "train --help"])
def test_a_reader_that_leaves_early_causes_no_traceback(command: str) -> None:
    """`search-r1 … | head` ends silently: argparse ignores a broken pipe, the rest report it."""
    program = [sys.executable, "-m", "search_r1.cli", *command.split()]
    with subprocess.Popen(
        program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == (0 if command.startswith("train") else 141)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "--model", "org/name", "--data=my data"],
         "fix: BASE_MODEL=org/name DATA_DIR='my data' bash train_grpo.sh"),
        (["train.py"], "fix: bash train_grpo.sh"),
        (["train.py", "trainer.no_such=1"], "no_such"),
        (["evaluate.py", "--model", "org/name"], "--data: got nothing"),
    ],
)  # fmt: skip
def test_commands_of_other_guides_are_answered_with_ours(words: list[str], expected: str) -> None:
    """`python train.py --model …` and `python evaluate.py …` say what to run instead."""
    command = [sys.executable, str(ROOT / words[0]), *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 2) and expected in done.stderr


@pytest.mark.parametrize("is_installed", [True, False])
def test_the_package_evaluate_is_not_hidden(is_installed: bool, tmp_path: Path) -> None:
    """A program in the checkout imports the installed package, or learns that there is none."""
    if is_installed:
        (tmp_path / "evaluate.py").write_text("load = 7\n")
    program = "import sys, evaluate; sys.exit(evaluate.load)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    has_none = done.stderr.rstrip().endswith("ModuleNotFoundError: No module named 'evaluate'")
    assert (done.returncode, has_none) == ((7, False) if is_installed else (1, True))
