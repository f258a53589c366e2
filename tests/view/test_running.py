"""`search-r1 view` as a process, and its command line."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from search_r1.view.command import main
from tests.runs import written as runs


def test_a_run_that_is_training_is_followed(folder: Path, tmp_path: Path) -> None:
    """A new step appears in the answers; another name in Host is refused; SIGTERM ends it."""
    port_file = tmp_path / "port"
    command = [sys.executable, "-m", "search_r1.cli", "view", str(folder), "--port", "0",
               "--port-file", str(port_file), "--index-dir", str(tmp_path / "index")]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            until(port_file.is_file)
            url = f"http://127.0.0.1:{int(port_file.read_text())}"
            with httpx.Client(base_url=url, trust_env=False) as client:

                def count() -> int:
                    return int(client.get("/api/runs").json()[0]["trajectories"]["count"])

                until(lambda: count() == 7)
                runs.write_rollouts(folder, 3, [(runs.dialogue("Q?", ["x"], "y"), 0.0)])
                until(lambda: count() == 8)
                other = client.get("/api/runs", headers={"Host": "evil.example"})
                assert other.status_code == 400
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        assert server.stderr is not None and str(folder) in server.stderr.read()


def until(is_true: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(("words", "message"), [
    (["nothing"], "RUN: got nothing, expected a run's trainer.default_local_dir"),
    (["{run}", "--host", "0.0.0.0"], "--host: got 0.0.0.0 without a token, expected a token"),
    (["{run}", "--port", "99999"], "--port: got 99999"),
    ([], "RUN: got nothing, expected the folder of at least one run"),
    (["{run}", "--export=run.html"], "--export: got a flag that fell"),
    (["{run}", "--export_trajectories", "1"], "--export-trajectories: got a flag that fell"),
    (["{run}", "--report"], "--report: got a flag that fell"),
])  # fmt: skip
def test_mistakes_are_reported_in_one_line(
    folder: Path, tmp_path: Path, words: list[str], message: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The command ends before anything is served."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VIEW_TOKEN", raising=False)
    options = [word.format(run=folder) for word in words]
    try:
        status = main([*options, "--index-dir", str(tmp_path / "index")])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert message in (logged := capsys.readouterr().err) and logged.count("\n") == 1
