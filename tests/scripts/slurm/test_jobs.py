"""The recipes of scripts/slurm in a real Slurm; the trainer's place is held by a stand-in."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.scripts.slurm.cluster import (
    PACKAGES,
    ROOT,
    Cluster,
    missing_programs,
    start_cluster,
    wait_until,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes of Slurm."""
    missing = missing_programs()
    assert not missing, f"these tests want a Slurm, and {missing} are missing: {PACKAGES}"
    with start_cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    """The variables of a job on the CPU with the example's retriever."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes((ROOT / "example" / "corpus.jsonl").read_bytes())
    return {
        "PYTHON": sys.executable,
        "ENTRY": "tests.scripts.slurm.stand_in",
        "N_GPUS": "1",
        "OUTPUT_DIR": str(tmp_path / "run"),
        "LOG_DIR": str(tmp_path / "logs"),
        "CORPUS_PATH": str(corpus),
        "RETRIEVER_NAME": "bm25",
    }


def processes_of(job: str) -> list[str]:
    """Command lines of what a job started and has not ended."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        try:
            mark = process.environ().get("SEARCH_R1_JOB", "")
        except psutil.Error:
            continue
        if mark.startswith(f"{job}."):
            found.append(" ".join(process.info["cmdline"] or []))
    return found


def assert_clean(job: str) -> None:
    """Nothing of the job runs, and nothing is left in the nodes' temporary folder."""
    wait_until(lambda: processes_of(job) == [], 15, f"end of {processes_of(job)}")
    assert not Path(f"/tmp/sr1-{job}").exists()


def test_the_warning_saves_and_the_job_goes_on_until_it_is_done(
    cluster: Cluster, settings: dict[str, str], tmp_path: Path
) -> None:
    """Twice warned, the job twice saves, goes back into the queue, and goes on; then it is done."""
    job = cluster.submit("train.sbatch", env=settings)
    for step in (1, 2):
        cluster.wait_log(job, f"stand-in: step {step} auto nodes=1")
        cluster.command("scancel", "--batch", "--signal=USR1", job)
        cluster.wait_restart(job, step)
        assert f"back into the queue; it goes on after step {step}" in cluster.log(job)
    cluster.wait_state(job, "COMPLETED")
    log = cluster.log(job)
    assert re.search(r"step 3 .*ray=None retriever=http://127.0.0.1:\d+/retrieve end=\d+", log)
    assert (tmp_path / "logs" / job / "job.log").read_text() == log
    assert "documents" in (tmp_path / "logs" / job / "retriever-n1.log").read_text()
    assert_clean(job)


def test_the_time_limit_warns_by_itself(cluster: Cluster, settings: dict[str, str]) -> None:
    """Slurm's own clock sends the signal that the recipe asks for before the time is over."""
    options = ["--time=1", "--signal=B:USR1@50"]
    job = cluster.submit("train.sbatch", options=options, env=settings)
    cluster.wait_log(job, "time is nearly over: asking for a checkpoint", 90)
    cluster.wait_restart(job, 1)
    cluster.wait_log(job, "stand-in: step 2")
    cluster.command("scancel", job)
    cluster.wait_state(job, "CANCELLED")


def test_a_cancelled_job_saves_and_leaves_nothing(
    cluster: Cluster, settings: dict[str, str]
) -> None:
    """scancel: the trainer may save, the job stays cancelled, and even orphans are ended."""
    job = cluster.submit("train.sbatch", env={**settings, "STAND_IN_LEAVES": "1"})
    cluster.wait_log(job, "stand-in: step 1")
    assert any("sleep 4321" in line for line in processes_of(job))
    cluster.command("scancel", job)
    cluster.wait_state(job, "CANCELLED")
    cluster.wait_log(job, "is over")
    assert "saved step 1" in cluster.log(job)
    assert "back into the queue" not in cluster.log(job)
    assert cluster.facts(job)["Restarts"] == "0"
    assert_clean(job)
