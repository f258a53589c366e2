"""The command line of training: option mistakes are reported before heavy imports."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from verl.config import Config, cli
from verl.errors import DataError
from verl.trainer import main_ppo

PROGRAM = """
import sys
from verl.trainer import main_ppo
status = main_ppo.main(sys.argv[1:])
heavy = {"torch", "ray", "transformers", "vllm", "datasets"} & set(sys.modules)
print(status, sorted(heavy))
"""


def test_a_mistyped_option_imports_nothing_heavy() -> None:
    """The error comes in under a second: torch, Ray, transformers and vLLM are not imported."""
    command = [sys.executable, "-c", PROGRAM, "trainer.totl_epochs=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 []\n", done.stderr
    assert "did you mean trainer.total_epochs?" in done.stderr


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "stopped; trainer.resume_mode=auto continues"),
        (PermissionError(13, "Permission denied", "runs"), 2, "Permission denied: 'runs'"),
        (OSError(28, "No space left on device"), 2, "No space left on device"),
    ],
)
def test_what_ends_a_run_from_outside_is_one_line(
    error: BaseException, status: int, message: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A second Ctrl-C or a disk error, whatever the run was doing; other errors are bugs."""

    def fail(argv: object) -> None:
        raise error

    monkeypatch.setattr(cli, "compose_runs", fail)
    assert main_ppo.main([]) == status
    output = capsys.readouterr().err
    assert message in output and output.count("\n") == 1
    error = ConnectionResetError(104, "reset")
    with pytest.raises(ConnectionResetError):
        main_ppo.main([])


def test_each_run_of_a_sweep_that_fails_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is that of the first failure; later errors are printed too."""

    def fail(config: Config) -> None:
        raise DataError(f"seed {config.trainer.seed}")

    monkeypatch.setitem(sys.modules, "verl.trainer.run", SimpleNamespace(run=fail))
    files = ["data.train_files=t", "data.val_files=v", "actor_rollout_ref.model.path=m"]
    assert main_ppo.main(["-m", *files, "trainer.seed=1,2"]) == 2
    assert capsys.readouterr().err.splitlines()[-2:] == ["seed 1", "seed 2"]
