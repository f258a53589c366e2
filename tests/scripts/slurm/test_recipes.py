"""The scripts in scripts/slurm without a Slurm: fakes of its two commands are on the PATH.

The recipes in a real Slurm are tested in test_jobs.py, which is slow.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.slurm.memory import GIB, Held, report

ROOT = Path(__file__).resolve().parents[3]
RECIPES = ROOT / "scripts" / "slurm"
SCONTROL = """#!/bin/bash
case "$1 $2" in
"show hostnames") echo n1 ;;
*) echo "scontrol $*" ;;
esac
"""
SQUEUE = """#!/bin/bash
[[ $* != *--jobs=7* ]] || echo 7
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The variables that Slurm and the user set for job 42 on one node, without a retriever."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"scontrol": SCONTROL, "squeue": SQUEUE}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PYTHON": sys.executable,
        "ENTRY": "tests.scripts.slurm.stand_in",
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "N_GPUS": "1",
        "RETRIEVER_URL": "empty",
        "OUTPUT_DIR": str(tmp_path / "run"),
        "LOG_DIR": str(tmp_path / "logs"),
        "RAY_TMP": str(tmp_path),
    }


def job(environment: dict[str, str], *signals: int, **variables: str) -> tuple[int, str]:
    """Run train.sbatch, sending each signal to its shell in training; returns status and output."""
    process = subprocess.Popen(
        ["bash", str(RECIPES / "train.sbatch")],
        env={**environment, **variables},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    output = ""
    for number in signals:
        while "stand-in: step" not in output:
            output += process.stdout.readline()
            assert process.poll() is None, output
        process.send_signal(number)
    output += process.communicate(timeout=60)[0]
    return process.returncode, output


def finish(environment: dict[str, str]) -> None:
    """Let the next start find all steps but the last done."""
    (Path(environment["OUTPUT_DIR"]) / "global_step_2").mkdir(parents=True)


def test_a_finished_run_is_not_requeued(environment: dict[str, str]) -> None:
    """Status 0, automatic resume, and nothing left in the job's temporary folder."""
    finish(environment)
    status, output = job(environment)
    assert status == 0
    assert "stand-in: step 3 auto nodes=1" in output
    assert "scontrol requeue" not in output
    assert not Path(environment["RAY_TMP"], "sr1-42").exists()


def test_a_warned_run_saves_and_is_requeued(environment: dict[str, str]) -> None:
    """SIGUSR1 reaches the trainer; its status 75 requeues the job."""
    status, output = job(environment, signal.SIGUSR1)
    assert status == 75
    assert "saved step 1" in output
    assert output.index("continues after step 1") < output.index("scontrol requeue 42")


def test_a_cancelled_run_is_not_requeued(environment: dict[str, str]) -> None:
    """After SIGTERM, status 75 means that a person may submit the run again."""
    status, output = job(environment, signal.SIGTERM)
    assert status == 75
    assert "saved step 1" in output
    assert "scontrol requeue" not in output


def test_a_crash_is_not_requeued(environment: dict[str, str]) -> None:
    """A mistake of the user or a bug would only happen again."""
    status, output = job(environment, STAND_IN_STATUS="2")
    assert status == 2
    assert "scontrol requeue" not in output


def test_a_run_without_its_retriever_is_requeued(environment: dict[str, str]) -> None:
    """Status 4 requeues the job: the next start waits for the retriever with its own limit."""
    (Path(environment["LOG_DIR"]) / "42").mkdir(parents=True)
    status, output = job(environment, STAND_IN_STATUS="4")
    assert status == 4
    assert "scontrol requeue 42" in output


def test_requeues_are_bounded(environment: dict[str, str]) -> None:
    """The last allowed start is not requeued."""
    for restarts, queued in (("4", True), ("5", False)):
        output = job(environment, signal.SIGUSR1, SLURM_RESTART_COUNT=restarts, MAX_REQUEUES="5")[1]
        assert ("scontrol requeue 42" in output) is queued
        assert ("MAX_REQUEUES=5 is used up" in output) is not queued


def test_starts_without_progress_are_bounded(environment: dict[str, str]) -> None:
    """A job whose time never suffices for a step stops requeueing, and reports why."""
    outputs = [job(environment, signal.SIGUSR1, STAND_IN_SAVES_NOTHING="1")[1] for _ in range(3)]
    assert ["scontrol requeue" in output for output in outputs] == [True, True, False]
    assert "3 starts in a row without a new checkpoint" in outputs[2]


def test_two_jobs_do_not_write_into_one_folder(environment: dict[str, str]) -> None:
    """A running job keeps the folder; an ended one does not."""
    finish(environment)
    owner = Path(environment["OUTPUT_DIR"]) / "slurm_job"
    owner.write_text("7\n")
    status, output = job(environment)
    assert (status, "job 7 writes into" in output) == (2, True)
    owner.write_text("6\n")
    assert job(environment)[0] == 0
    assert owner.read_text() == "42\n"


def test_orphans_of_the_job_are_killed(environment: dict[str, str]) -> None:
    """A process whose parent is gone is found by the job's mark."""
    finish(environment)
    status, output = job(environment, STAND_IN_LEAVES="1")
    assert status == 0
    assert "killing 1 processes that were left" in output


def test_another_recipe_may_be_named(environment: dict[str, str], tmp_path: Path) -> None:
    """It gets the run's folder, the number of nodes and the options."""
    recipe = program(tmp_path / "train_9b.sh", 'echo "recipe: $OUTPUT_DIR $N_NODES $*"')
    run = tmp_path / "runs"
    status, output = job(environment, RECIPE=str(recipe), OUTPUT_DIR=str(run))
    assert status == 0
    assert f"recipe: {run} 1 trainer.resume_mode=auto" in output
    status, output = job(environment, RECIPE="no.sh", OUTPUT_DIR=str(run))
    assert (status, "RECIPE=no.sh: no such file" in output) == (2, True)


def test_a_job_without_gpus_is_refused(environment: dict[str, str]) -> None:
    """There are neither GPUs from Slurm nor N_GPUS."""
    del environment["N_GPUS"]
    status, output = job(environment)
    assert status == 2
    assert "give sbatch --gpus-per-node=8, or set N_GPUS" in output


def test_engines_with_gpus_of_their_own_leave_the_others_to_ranks(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Slurm counts the GPUs of a node; the ranks get those that engines do not."""
    del environment["N_GPUS"]
    recipe = str(program(tmp_path / "train_x.sh", 'echo "ranks: $N_GPUS engines: $ROLLOUT_GPUS"'))
    status, output = job(environment, RECIPE=recipe, SLURM_GPUS_ON_NODE="8", ROLLOUT_GPUS="2")
    assert (status, "ranks: 6 engines: 2" in output) == (0, True)


def test_an_absent_retriever_has_a_limit(environment: dict[str, str]) -> None:
    """Without the retriever in time nothing trains; the message has its address."""
    began = time.monotonic()
    status, output = job(
        environment, RETRIEVER_URL="http://127.0.0.1:9/retrieve", RETRIEVER_WAIT="1"
    )
    assert status == 1
    assert "http://127.0.0.1:9/health: not ready after 1 s" in output
    assert "stand-in" not in output
    assert time.monotonic() - began < 30


def test_a_retriever_that_cannot_start_ends_the_job(environment: dict[str, str]) -> None:
    """Its own message is in the job's log."""
    del environment["RETRIEVER_URL"]
    status, output = job(environment, CORPUS_PATH="/no/corpus.jsonl")
    assert status == 1
    assert "the retriever on n1: its process ended" in output
    assert "| corpus /no/corpus.jsonl does not exist" in output


def test_the_retriever_may_have_its_own_interpreter(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """faiss-gpu and vLLM need different environments: RETRIEVER_PYTHON serves, PYTHON trains."""
    del environment["RETRIEVER_URL"]
    python = program(tmp_path / "other" / "python", 'echo "the other one: $*"; exit 1')
    status, output = job(environment, RETRIEVER_PYTHON=str(python))
    assert status == 1
    assert "| the other one: -m search_r1.search.retrieval_server" in output


def test_a_job_too_small_for_trainer_and_retriever_is_refused(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Their memory is checked before training; the message has the fix and the mapped bytes."""
    finish(environment)
    del environment["RETRIEVER_URL"]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "contents": "\\"Oslo\\"\\nA city."}\n')
    small = {"CORPUS_PATH": str(corpus), "SLURM_MEM_PER_NODE": "1024"}
    status, output = job(environment, **small)
    assert status == 2 and "stand-in" not in output
    assert "memory of the job on this node: 1.0 GiB; the retriever holds 0." in output
    assert "expected TRAINER_MEM=8 GiB; fix: give sbatch more --mem" in output
    status, output = job(environment, **small, TRAINER_MEM="0.1")
    assert status == 0 and "left for the trainer: 0." in output


def test_an_index_that_does_not_stay_in_memory_is_reported() -> None:
    """64 GiB of mapped vectors and a trainer of 90 in a job of 128: it runs, but slowly."""
    retriever = Held(private=2 * GIB, hot=10 * GIB, mapped=64 * GIB)
    fits, message = report(retriever, 128 * GIB, 90 * GIB)
    assert fits and "does not stay in memory" in message and "retriever.sbatch" in message
    assert "does not stay" not in report(retriever, 256 * GIB, 90 * GIB)[1]
    assert not report(Held(64 * GIB, 0, 0), 128 * GIB, 90 * GIB)[0]


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def test_modules_a_virtual_environment_and_a_command_make_the_environment(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """They are loaded in this order, and the virtual environment's python trains."""
    finish(environment)
    del environment["PYTHON"]
    binaries = tmp_path / "venv" / "bin"
    program(binaries / "python3", f'echo venv python >&2; exec {sys.executable} "$@"')
    program(binaries / "activate", f"echo activate; PATH={binaries}:$PATH")
    status, output = job(
        environment,
        **{"BASH_FUNC_module%%": "() { echo module $*; }"},
        MODULES="cuda/12.4 gcc",
        VENV=str(binaries.parent),
        SETUP="echo setup",
    )
    assert status == 0
    printed = [line for line in output.splitlines() if "slurm:" not in line]
    assert printed[:3] == ["module load cuda/12.4 gcc", "activate", "setup"]
    assert printed.index("venv python") < next(i for i, x in enumerate(printed) if "stand-in" in x)


def test_a_conda_environment_is_activated(environment: dict[str, str], tmp_path: Path) -> None:
    """With the conda that the user names, or the one on the PATH."""
    finish(environment)
    conda = program(tmp_path / "conda", "echo 'conda() { echo conda $*; }'")
    status, output = job(environment, CONDA_EXE=str(conda), CONDA_ENV="search")
    assert status == 0
    assert "conda activate search" in output


def test_a_missing_environment_ends_the_job(environment: dict[str, str]) -> None:
    """The message names the wrong variable."""
    for name, value in (("VENV", "/no/venv"), ("MODULES", "cuda"), ("SETUP", "false")):
        status, output = job(environment, **{name: value})
        assert status == 2
        assert name in output.splitlines()[-2]


def submit(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run submit.sh, which only prints its command, unless `env` has DRY_RUN=""."""
    return subprocess.run(
        [str(RECIPES / "submit.sh"), *arguments],
        env={"DRY_RUN": "1", **env},
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_submit_translates_a_file_of_settings(environment: dict[str, str], tmp_path: Path) -> None:
    """Settings become options of sbatch, which a dry run does not need; -- precedes others."""
    for name in ("bash", "dirname"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    environment["PATH"] = str(tmp_path / "bin")  # holds no sbatch
    conf = tmp_path / "my.conf"
    conf.write_text(
        'WARNING=60\nPARTITION=gpu\nNODES=2\nGPUS=8\nTIME=1:00:00\nSBATCH_ARGS="--exclusive"\n'
    )
    done = submit("train", str(conf), "--nice=5", "--", "max_turns=4", env=environment)
    command = done.stdout.split()
    assert command[0] == "sbatch"
    assert {"--partition=gpu", "--nodes=2", "--gpus-per-node=8", "--time=1:00:00", "--exclusive",
            "--nice=5"} <= set(command)  # fmt: skip
    assert "--signal=B:USR1@60" in command
    assert command[-2:] == ["scripts/slurm/train.sbatch", "max_turns=4"]
    command = submit("retriever", str(conf), "--mem=9G", env=environment).stdout.split()
    assert "--mem=9G" in command
    assert "--gpus-per-node=8" not in command
    assert command[-1] == "scripts/slurm/retriever.sbatch"


def test_submit_names_what_is_missing(environment: dict[str, str], tmp_path: Path) -> None:
    """A recipe, a settings file and sbatch are required."""
    assert "usage:" in submit("both", env=environment).stderr
    assert "no such file" in submit("train", "no.conf", env=environment).stderr
    conf = tmp_path / "my.conf"
    missing = {"BASE_MODEL": "./no/model", "DATA_DIR": "no/d", "CORPUS_PATH": "no/c",
               "INDEX_PATH": "no/i"}  # fmt: skip
    here = {"RETRIEVER_URL": "", "RETRIEVER_FILE": ""}
    conf.write_text("".join(f"{name}={value}\n" for name, value in {**missing, **here}.items()))
    told = submit("train", str(conf), env=environment)
    assert told.returncode == 2 and told.stdout == ""
    for name, value in missing.items():
        assert f"{name}: got {value}, expected" in told.stderr
    for relative in ("scripts/no-model", "models/of/mine"):  # no names of the hub
        conf.write_text(f"BASE_MODEL={relative}\nRETRIEVER_URL=http://host:8000\n")
        assert "BASE_MODEL: got" in submit("train", str(conf), env=environment).stderr
    elsewhere = {**environment, "CHECK_FILES": ""}
    assert submit("train", str(conf), env=elsewhere).returncode == 0
    hub = "BASE_MODEL=org/name\nRETRIEVER_URL=http://host:8000\nCORPUS_PATH=no/c\n"
    conf.write_text(hub)
    assert submit("train", str(conf), env=environment).returncode == 0
    if shutil.which("sbatch") is None:
        example = str(RECIPES / "example.conf")
        assert "login node" in submit("train", example, env={**environment, "DRY_RUN": ""}).stderr


@pytest.mark.parametrize(
    "path", sorted(p for p in RECIPES.iterdir() if p.is_file()), ids=lambda path: path.name
)
def test_the_scripts_have_no_syntax_errors(path: Path) -> None:
    """Bash parses each script, including branches that no test runs."""
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
