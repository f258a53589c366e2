"""The recipes of scripts/slurm in a real Slurm, with a fake trainer."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.scripts.slurm.cluster import (
    ROOT,
    Cluster,
    wait_until,
)

pytestmark = pytest.mark.slow


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
    """Return the command lines of the job's processes that still run."""
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
    """Assert that no process of the job runs, and that the temporary folder is empty."""
    wait_until(lambda: processes_of(job) == [], 60, f"end of {processes_of(job)}")
    assert not Path(f"/tmp/sr1-{job}").exists()


def test_a_warned_job_saves_and_continues_until_it_is_done(
    cluster: Cluster, settings: dict[str, str], tmp_path: Path
) -> None:
    """After two warnings the job has saved, was requeued and continued twice; then it is done."""
    job = cluster.submit("train.sbatch", env=settings)
    for step in (1, 2):
        cluster.wait_log(job, f"stand-in: step {step} auto nodes=1")
        cluster.command("scancel", "--batch", "--signal=USR1", job)
        cluster.wait_restart(job, step)
        assert f"requeued; it continues after step {step}" in cluster.log(job)
    cluster.wait_state(job, "COMPLETED")
    log = cluster.log(job)
    assert re.search(r"step 3 .*ray=None retriever='http://127.0.0.1:\d+/retrieve' end=\d+", log)
    assert (tmp_path / "logs" / job / "job.log").read_text() == log
    assert "documents" in (tmp_path / "logs" / job / "retriever-n1.log").read_text()
    assert_clean(job)


def test_a_cancelled_job_saves_and_leaves_nothing(
    cluster: Cluster, settings: dict[str, str]
) -> None:
    """After scancel the trainer may save, the job stays cancelled, and even orphans are killed."""
    job = cluster.submit("train.sbatch", env={**settings, "STAND_IN_LEAVES": "1"})
    cluster.wait_log(job, "stand-in: step 1")
    assert any("sleep 4321" in line for line in processes_of(job))
    cluster.command("scancel", job)
    cluster.wait_state(job, "CANCELLED")
    cluster.wait_log(job, "is over")
    assert "saved step 1" in cluster.log(job)
    assert "requeued" not in cluster.log(job)
    assert cluster.facts(job)["Restarts"] == "0"
    assert_clean(job)


def test_two_jobs_on_one_node_do_not_disturb_each_other(
    cluster: Cluster, settings: dict[str, str], tmp_path: Path
) -> None:
    """Each has its own retriever; the end of one leaves the other's processes running."""
    options = ["--nodelist=n1", "--cpus-per-task=4"]
    jobs = [
        cluster.submit(
            "train.sbatch", options=options, env={**settings, "OUTPUT_DIR": str(tmp_path / name)}
        )
        for name in ("one", "two")
    ]
    urls = []
    for job in jobs:
        cluster.wait_log(job, "stand-in: step 1")
        urls += re.findall(r"retriever='(http\S+)'", cluster.log(job))
    assert len(set(urls)) == 2
    cluster.command("scancel", jobs[0])
    cluster.wait_state(jobs[0], "CANCELLED")
    assert_clean(jobs[0])
    assert cluster.state(jobs[1]) == "RUNNING"
    assert httpx.get(urls[1].replace("retrieve", "health"), trust_env=False).is_success
    cluster.command("scancel", jobs[1])
    cluster.wait_state(jobs[1], "CANCELLED")
    assert_clean(jobs[1])


def test_a_dead_retriever_is_restarted_at_its_address(
    cluster: Cluster, settings: dict[str, str]
) -> None:
    """The trainer's address answers again after the server was killed."""
    job = cluster.submit("train.sbatch", env=settings)
    cluster.wait_log(job, "stand-in: step 1")
    (url,) = re.findall(r"retriever='(http\S+)'", cluster.log(job))
    (server,) = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "search_r1.search.retrieval_server" in (process.info["cmdline"] or [])
        and settings["CORPUS_PATH"] in process.info["cmdline"]
    ]
    server.kill()
    server.wait(10)
    wait_until(lambda: answers(url), 40, "the retriever")
    cluster.command("scancel", job)
    cluster.wait_state(job, "CANCELLED")
    assert_clean(job)


def answers(url: str) -> bool:
    try:
        return httpx.get(url.replace("retrieve", "health"), trust_env=False).is_success
    except httpx.TransportError:
        return False


def test_a_retriever_in_a_separate_job(
    cluster: Cluster, settings: dict[str, str], tmp_path: Path
) -> None:
    """Training waits for its address, which is removed with the retriever's job."""
    file = tmp_path / "retriever.url"
    env = {**settings, "RETRIEVER_FILE": str(file)}
    training = cluster.submit("train.sbatch", env=env)
    serving = cluster.submit("retriever.sbatch", env=env)
    cluster.wait_log(training, "stand-in: step 1")
    assert f"retriever='{file.read_text().strip()}'" in cluster.log(training)
    cluster.command("scancel", training, serving)
    for job in (training, serving):
        cluster.wait_state(job, "CANCELLED")
        assert_clean(job)
    assert not file.exists()


def test_several_nodes_share_one_ray(cluster: Cluster, settings: dict[str, str]) -> None:
    """Two nodes have one Ray cluster and a retriever each, all of which end with the job."""
    env = {**settings, "RETRIEVER_NODES": "all"}
    job = cluster.submit("train.sbatch", options=["--nodes=2"], env=env)
    cluster.wait_log(job, "stand-in: step 1")
    log = cluster.log(job)
    (address,) = re.findall(r"Ray: 2 nodes at (\S+)", log)
    assert f"nodes=2 ray={address} " in log
    (urls,) = re.findall(r"retriever='(http\S+)'", log)
    assert len(set(urls.split(","))) == 2
    cluster.command("scancel", "--batch", "--signal=USR1", job)
    cluster.wait_restart(job, 1)
    assert_clean(job)
    cluster.command("scancel", job)


def test_a_job_with_a_failed_node_starts_again(cluster: Cluster, settings: dict[str, str]) -> None:
    """Slurm ends and requeues the job by itself; it starts when the node is back."""
    job = cluster.submit("train.sbatch", options=["--nodelist=n1"], env=settings)
    cluster.wait_log(job, "stand-in: step 1")
    cluster.command("scontrol", "update", "NodeName=n1", "State=DOWN", "Reason=test")
    try:
        cluster.wait_restart(job, 1)
        assert_clean(job)
    finally:
        cluster.resume("n1")
    cluster.wait_log(job, "start 2, on n1")
    cluster.wait_log(job, "stand-in: step 2")
    cluster.command("scancel", job)
    cluster.wait_state(job, "CANCELLED")
