"""Parsing of `nvidia-smi` output, and checks of driver, cards and compilers."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import nvidia_smi
from verl.errors import ResourceError
from verl.nvidia import (
    Card,
    Nvidia,
    ask_driver,
    card_problem,
    compiler_problem,
    describe_cards,
    driver_problem,
)

H100 = Card("NVIDIA H100 80GB HBM3", 81559, (9, 0))


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_no_nvidia_smi_is_no_driver(path: Path) -> None:
    """A machine without the program has no GPU, which is not an error."""
    assert ask_driver() is None


def test_eight_cards(path: Path) -> None:
    """Each card is listed with memory and capability, and equal cards are counted."""
    nvidia_smi.write_nvidia_smi(path, [nvidia_smi.H100] * 8)
    nvidia = ask_driver()
    assert nvidia == Nvidia("580.65.06", (13, 0), (H100,) * 8)
    assert driver_problem(nvidia) == card_problem(nvidia) == "" and nvidia.num_devices == 8
    assert describe_cards(nvidia) == "8 x NVIDIA H100 80GB HBM3, 79.6 GiB, capability 9.0"


@pytest.mark.parametrize(
    ("driver", "header", "is_supported"),
    [
        ("570.86.15", "CUDA Version: 12.8", False),
        ("580.65.06", "CUDA Version: 13.0", True),
        ("615.71.09", "CUDA UMD Version: 13.4", True),
        ("535.261.03", "CUDA Version: 13.0", True),
        ("570.86.15", "CUDA Version: N/A", False),
        ("580.65.06", "CUDA Version: N/A", True),
    ],
    ids=["old", "first", "newer format", "cuda-compat", "old, no CUDA", "first, no CUDA"],
)
def test_a_driver_must_run_the_wheels_cuda(
    path: Path, driver: str, header: str, is_supported: bool
) -> None:
    """The CUDA version of `nvidia-smi` decides; if it is missing, the driver's number does."""
    nvidia_smi.write_nvidia_smi(path, driver=driver, header=header)
    nvidia = ask_driver()
    assert nvidia is not None and (driver_problem(nvidia) == "") is is_supported
    assert is_supported or "fix: upgrade the driver" in driver_problem(nvidia)


def test_a_mig_slice_is_one_device(path: Path) -> None:
    """A process computes on one slice; a card with MIG but no slice is unusable."""
    nvidia_smi.write_nvidia_smi(path, [nvidia_smi.SLICED], listed=nvidia_smi.SLICES)
    nvidia = ask_driver()
    assert nvidia is not None and (nvidia.slices, nvidia.num_devices) == (("1g.10gb",), 1)
    assert card_problem(nvidia) == "" and describe_cards(nvidia).endswith("MIG: 1g.10gb")
    nvidia_smi.write_nvidia_smi(path, [nvidia_smi.SLICED], listed="GPU 0: NVIDIA H100")
    without = ask_driver()
    assert without is not None and "MIG on without a slice" in card_problem(without)


def test_a_failing_nvidia_smi_is_reported(path: Path) -> None:
    """Its output and exit status are in the message, with the fix."""
    nvidia_smi.write_broken_nvidia_smi(path)
    with pytest.raises(ResourceError, match=r"exit status 9 .*couldn't communicate.*fix: reload"):
        ask_driver()


def test_an_answer_without_cards_is_refused(path: Path) -> None:
    """`No devices were found` with exit status 0 means that the cards are hidden."""
    nvidia_smi.write_nvidia_smi(path, [])
    with pytest.raises(ResourceError, match=r"no card from nvidia-smi.*--gpus all"):
        ask_driver()


def test_drivers_that_know_fewer_columns(path: Path) -> None:
    """A driver before 510 refuses `compute_cap`; the query is repeated without it."""
    body = """case "$1" in
*compute_cap*) echo 'Field "compute_cap" is not a valid field to query.'; exit 2 ;;
--query-gpu=*) echo '470.82.01, Tesla T4, 15109' ;;
*) echo 'CUDA Version: 11.4' ;;
esac"""
    nvidia_smi.write_program(path / "nvidia-smi", body)
    assert ask_driver() == Nvidia("470.82.01", (11, 4), (Card("Tesla T4", 15109),))


def test_cards_too_old_for_the_wheels_are_refused() -> None:
    """A V100 is accepted only together with a newer card."""
    v100 = Card("Tesla V100-SXM2-32GB", 32768, (7, 0))
    assert "V100" in card_problem(Nvidia("580.65.06", (13, 0), (v100,)))
    assert card_problem(Nvidia("580.65.06", (13, 0), (v100, H100))) == ""


def test_compilers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing gcc and Python.h are both named; `CC` and clang are accepted instead of gcc."""
    monkeypatch.delenv("CC", raising=False)
    include = path / "include" / "python3.12"
    missing = compiler_problem(include)
    assert "no gcc and no Python.h" in missing and missing.endswith("gcc python3.12-dev")
    include.mkdir(parents=True)
    (include / "Python.h").touch()
    assert "got no gcc, " in compiler_problem(include)
    nvidia_smi.write_program(path / "clang", "")
    assert compiler_problem(include) == ""
    monkeypatch.setenv("CC", "icx")
    assert "got no icx, " in compiler_problem(include)


def test_it_needs_only_the_standard_library() -> None:
    """The installer imports it before anything is installed."""
    code = "import sys, verl.nvidia; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    root = Path(__file__).parents[2]
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout == "[]\n"
