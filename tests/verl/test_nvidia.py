"""Parsing of `nvidia-smi` output, and checks of driver, cards and compilers."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import nvidia_smi
from verl.errors import ResourceError
from verl.nvidia import (
    CUDA12,
    CUDA13,
    Card,
    Nvidia,
    Wheels,
    ask_driver,
    card_problem,
    compiler_problem,
    describe_cards,
    driver_problem,
    is_older,
    wheels_for,
    wheels_of,
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
    assert driver_problem(nvidia, CUDA13) == card_problem(nvidia) == ""
    assert nvidia.num_devices == 8
    assert describe_cards(nvidia) == "8 x NVIDIA H100 80GB HBM3, 79.6 GiB, capability 9.0"


B200 = "NVIDIA B200, 183359, 10.0, Disabled"
RTX_5090 = "NVIDIA GeForce RTX 5090, 32607, 12.0, [N/A]"
T4 = "Tesla T4, 15360, 7.5, [N/A]"


@pytest.mark.parametrize(
    ("driver", "header", "card", "wheels"),
    [
        ("580.65.06", "CUDA Version: 13.0", nvidia_smi.H100, CUDA13),
        ("615.71.09", "CUDA UMD Version: 13.4", nvidia_smi.H100, CUDA13),
        ("580.65.06", "CUDA Version: N/A", nvidia_smi.H100, CUDA13),
        ("535.261.03", "CUDA Version: 13.0", nvidia_smi.H100, CUDA13),
        ("575.57.08", "CUDA Version: 12.9", nvidia_smi.H100, CUDA12),
        ("570.86.15", "CUDA Version: 12.8", nvidia_smi.H100, CUDA12),
        ("570.86.15", "CUDA Version: N/A", nvidia_smi.H100, CUDA12),
        ("560.35.03", "CUDA Version: 12.6", nvidia_smi.H100, CUDA12),
        ("550.54.15", "CUDA Version: 12.4", nvidia_smi.H100, CUDA12),
        ("535.261.03", "CUDA Version: 12.2", nvidia_smi.H100, CUDA12),
        ("525.60.13", "CUDA Version: 12.0", nvidia_smi.H100, CUDA12),
        ("525.60.13", "", nvidia_smi.H100, CUDA12),
        ("470.82.01", "CUDA Version: 12.4", nvidia_smi.H100, CUDA12),
        ("580.65.06", "CUDA Version: 13.0", T4, CUDA13),
        ("575.57.08", "CUDA Version: 12.9", T4, None),
        ("520.61.05", "CUDA Version: 11.8", nvidia_smi.H100, None),
        ("520.61.05", "CUDA Version: N/A", nvidia_smi.H100, None),
        ("470.82.01", "CUDA Version: 11.4", T4, None),
        ("[N/A]", "", nvidia_smi.H100, None),
        ("580.65.06", "CUDA Version: 13.0", B200, CUDA13),
        ("575.57.08", "CUDA Version: 12.9", B200, None),
        ("575.57.08", "", RTX_5090, None),
        ("570.86.15", "CUDA Version: 12.8", RTX_5090, None),
        ("570.86.15", "", B200, None),
    ],
    ids=lambda value: value.partition(",")[0] if isinstance(value, str) else None,
)
def test_the_driver_chooses_the_wheels(
    path: Path, driver: str, header: str, card: str, wheels: Wheels | None
) -> None:
    """The CUDA version of `nvidia-smi` decides; if it is missing, the driver's number does."""
    nvidia_smi.write_nvidia_smi(path, [nvidia_smi.H100, card], driver=driver, header=header)
    nvidia = ask_driver()
    assert nvidia is not None
    if wheels is None:
        with pytest.raises(ResourceError, match="nvidia-driver-580"):
            wheels_for(nvidia)
    else:
        assert wheels_for(nvidia) is wheels and driver_problem(nvidia, wheels) == ""


@pytest.mark.parametrize(
    ("cuda", "wheels"), [("13.0", CUDA13), ("14.1", CUDA13), ("12.8", CUDA12), ("", CUDA12)]
)
def test_an_installed_torch_needs_the_driver_of_its_cuda(cuda: str, wheels: Wheels) -> None:
    """A driver without CUDA 13 is no problem for the wheels of CUDA 12, or before installation."""
    assert wheels_of(cuda) is wheels
    problem = driver_problem(Nvidia("570.86.15", (12, 8), (H100,)), wheels)
    assert bool(problem) is (wheels is CUDA13)
    assert not problem or ("expected 580 or newer" in problem and "make install VENV=" in problem)


@pytest.mark.parametrize(
    ("installed", "expected"),
    [("0.25.1", True), ("0.26.0", False), ("0.100.0", False), ("1.0rc1", False), ("", False)],
)
def test_versions_are_compared_as_numbers(installed: str, expected: bool) -> None:
    """0.100 is newer than 0.26; what is not installed is not old."""
    assert is_older(installed, (0, 26)) is expected


def test_other_cards_need_the_wheels_of_cuda_13() -> None:
    """Those of CUDA 12 hold attention for capability 8 and 9; the message names the card."""
    card = Card("NVIDIA B200", 183359, (10, 0))
    problem = driver_problem(Nvidia("570.86.15", (12, 8), (H100, card)), CUDA12)
    assert "got 570.86.15 (CUDA 12.8), expected 580 or newer for NVIDIA B200" in problem
    assert driver_problem(Nvidia("570.86.15", (12, 8), (H100,)), CUDA12) == ""


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
    with pytest.raises(ResourceError, match="exit status 9"):
        ask_driver()


def test_an_answer_without_cards_is_refused(path: Path) -> None:
    """`No devices were found` with exit status 0 means that the cards are hidden."""
    nvidia_smi.write_nvidia_smi(path, [])
    with pytest.raises(ResourceError, match="--gpus all"):
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
