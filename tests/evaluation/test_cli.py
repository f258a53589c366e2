"""The command line of `search-r1 evaluate`: errors are one message, before any work."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from search_r1.evaluation.__main__ import main
from search_r1.evaluation.options import EvaluationOptions
from search_r1.inference.building import run_config
from tests.bad_models import whole_model

ROW = (
    '{"data_source": "nq", "prompt": "Question: who?", '
    '"reward_model": {"ground_truth": {"target": ["a"]}}}\n'
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model whose folder has dialogue settings."""
    folder = whole_model(tmp_path_factory.mktemp("model"))
    (folder / "search_r1.json").write_text('{"template": "short", "max_turns": 3, "topk": 2}')
    return str(folder)


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A file with one row."""
    file = tmp_path / "rows.jsonl"
    file.write_text(ROW)
    return str(file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--n", "4"], "--n: got 4 with temperature 0"),
        (["--n", "2", "--temperature", "1", "--pass-k", "1", "4"], "--pass-k: got (1, 4)"),
        (["--temperature", "-1"], "--temperature: got -1.0"),
        (["--num-rows", "0"], "--num-rows: got 0"),
        (["--judge-url", "http://x"], "--judge-model: got None"),
        (["--judge-api-key-env", "KEY"], "--judge-api-key-env: got no --judge-url"),
        (["--retriever-url", "ftp://x"], "--retriever-url: retriever url 'ftp://x'; expected"),
        (["--retriever-url", "http://127.0.0.1:9"], "retrieval_launch.sh"),
        (["--retriever-url", "empty", "--max-start-length", "2"], "1 of 1 prompts over 2 tokens"),
        (["--retriever-url", "empty", "--data", "none.jsonl"], "none.jsonl"),
        (["--retriever-url", "empty", "--max-obs-length", "3"], "data.max_obs_length"),
        (["--retriever-url", "empty", "--model", "global_step_7"], "--model global_step_7"),
    ],
)
def test_a_mistake_is_one_message(
    model: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, options: list[str], message: str,
) -> None:  # fmt: skip
    """The message has got, expected and fix; the exit code is 2; nothing is written."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    words = ["--model", model, "--data", data, "--out", str(out), *options]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "fix:" in error
    assert not out.exists()


@pytest.mark.parametrize("missing", ["model", "data", "out"])
def test_what_must_be_given_is_asked_for(missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Model, data and output folder are required."""
    options = {"model": "m", "data": "d", "out": "o"}
    words = [w for k, v in options.items() if k != missing for w in (f"--{k}", v)]
    assert main(words) == 2
    assert f"--{missing}: got" in capsys.readouterr().err


def test_an_interrupted_checkpoint_is_refused(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A global_step_N without completion marker is no model; the user's own empty --out stays."""
    (tmp_path / "global_step_3").mkdir()
    out = tmp_path / "out"
    words = ["--model", str(tmp_path / "global_step_3"), "--data", data, "--out", str(out),
             "--retriever-url", "empty"]  # fmt: skip
    assert main(words) == 2
    assert "complete checkpoint" in capsys.readouterr().err
    assert not out.exists()
    out.mkdir()
    assert main(words) == 2
    assert out.is_dir()


def test_the_originals_run_is_evaluated(model: str, data: str, tmp_path: Path) -> None:
    """The run's latest checkpoint is used, and the manifest names it."""
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(model, run / "actor" / "global_step_150")
    words = ["--model", str(run), "--data", data, "--out", str(out), "--engine", "transformers",
             "--retriever-url", "empty", "--max-response-length", "2",
             "--device", "cpu"]  # fmt: skip
    assert main(words) == 0
    name = json.loads((out / "manifest.json").read_text())["model"]["name"]
    assert name == str(run / "actor" / "global_step_150")


def test_a_model_brings_its_own_dialogue(model: str) -> None:
    """The model's dialogue settings are used unless the command line overrides them."""

    def config(**more: Any) -> tuple[str, int, int]:
        options = EvaluationOptions(model=model, data=("d",), out="o", **more)
        config = run_config(options, model)
        return config.template, config.max_turns, config.retriever.topk

    assert config() == ("short", 3, 2)
    assert config(template="search_r1", max_turns=0, topk=5) == ("search_r1", 0, 5)


def test_the_command_evaluates_and_goes_on(
    model: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command works end to end; a repetition runs nothing; other options are refused."""
    out = tmp_path / "out"
    words = ["--model", model, "--data", data, "--out", str(out), "--engine", "transformers",
             "--retriever-url", "empty", "--max-response-length", "4", "--max-turns", "1",
             "--n", "2", "--temperature", "1", "--pass-k", "2", "--device", "cpu"]  # fmt: skip
    assert main(words) == 0
    assert "| pass@2 |" in capsys.readouterr().out
    assert {file.name for file in out.iterdir()} == {
        ".lock",
        "manifest.json",
        "samples.jsonl",
        "metrics.json",
        "report.md",
    }
    samples = (out / "samples.jsonl").read_bytes()
    assert samples.count(b"\n") == 2
    assert main(words) == 0
    assert (out / "samples.jsonl").read_bytes() == samples
    assert main([*words, "--top-p", "0.5"]) == 2
    assert "decoding.top_p: 1.0, now 0.5" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "table", "compare"])
def test_a_folder_without_evaluation_is_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands that read an evaluation say which file is missing."""
    folders = [str(tmp_path)] * (2 if command == "compare" else 1)
    assert main([command, *folders]) == 2
    assert "no manifest.json" in capsys.readouterr().err


def test_a_wrong_word_names_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong command lists the commands; a wrong option names the command's own help."""
    for words, expected in ((["tabel"], "run, report, compare, table"),
                            (["table", "--mesure", "em"], "search-r1 evaluate table --help"),
                            (["--modell", "x"], "search-r1 evaluate run --help")):  # fmt: skip
        with pytest.raises(SystemExit):
            main(words)
        assert expected in capsys.readouterr().err
