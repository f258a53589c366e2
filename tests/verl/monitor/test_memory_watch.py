"""The host's memory is monitored, and a warning names its users before a process is killed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from verl.config import Config
from verl.errors import DataError, RankLost
from verl.machine import HostMemory, control_groups
from verl.monitor import memory_watch as module
from verl.monitor.memory_watch import (
    HostWatch,
    Usage,
    describe,
    memory_by_process,
    rank_names,
    watch_host_memory,
)
from verl.single_controller.actors import ActorLocation
from verl.single_controller.reaper import MARK, REPLICA_MARK

GIB = 1 << 30
HOLD = "x = bytearray({size}); x[::4096] = b'1' * len(x[::4096]); print('held'); input()"


def readings(*free: float) -> HostWatch:
    """Return a watch that reads these free amounts, in GiB of 100, one after another."""
    values = iter(free)
    return HostWatch(low=0.1, read=lambda: HostMemory(100 * GIB, int(next(values) * GIB)))


def test_a_warning_names_the_users(caplog: pytest.LogCaptureFixture) -> None:
    """Below the threshold one line has this process, its memory, and what to lower."""
    readings(50, 9).metrics()
    assert not caplog.records
    watch = readings(9)
    watch.check()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "9.66 GB of 107.4 GB are free" in record.message
    assert "driver" in record.message and "to need less: " in record.message
    assert watch.recent_report == record.message


def test_a_warning_is_not_repeated_until_it_is_worse(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once below the threshold, again at half of that, and again after a recovery."""
    watch = readings(50, 9, 8, 5, 4, 50, 9)
    counts = []
    for _ in range(7):
        watch.check()
        counts.append(len(caplog.records))
    assert counts == [0, 1, 1, 1, 2, 2, 3]


def test_it_warns_before_ray_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Ray's threshold is, the warning comes earlier."""
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.8")
    assert HostWatch(low=0.1).low == pytest.approx(0.23)
    assert HostWatch(low=0.5).low == 0.5


def test_metrics_are_the_worst_since_the_last() -> None:
    """A peak between two steps is not missed."""
    watch = readings(60, 20, 70, 80)
    watch.check()
    watch.check()
    first, second = watch.metrics(), watch.metrics()
    assert first["perf/host_memory_free_gb"] == pytest.approx(20 * GIB / 1e9)
    assert first["perf/host_memory_used_share"] == pytest.approx(0.8)
    assert second["perf/host_memory_used_share"] == pytest.approx(0.2)


def test_a_reset_in_another_thread_does_not_end_the_watch() -> None:
    """`metrics` may reset the worst reading at any point of a check."""
    worst = iter([HostMemory(100, 50), None])
    racing = type(
        "Racing", (HostWatch,), {"_worst": property(lambda _: next(worst), lambda *_: None)}
    )
    racing(read=lambda: HostMemory(100, 40)).check()


def test_the_thread_reads_and_stops() -> None:
    """It reads by itself until it is stopped."""
    was_read = threading.Event()

    def read() -> HostMemory:
        was_read.set()
        return HostMemory(100, 50)

    watch = HostWatch(seconds=0.001, read=read)
    watch.start()
    assert was_read.wait(30)
    watch.stop()
    assert not any(thread.name == "host-memory" for thread in threading.enumerate())


@pytest.fixture
def helper() -> Iterator[subprocess.Popen[str]]:
    """A process that holds 300 MB, started like a replica of a run marked `test-run`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(size=300_000_000)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, MARK: "test-run", REPLICA_MARK: "test-run/replica-3"},
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.stdin.close()
    process.wait()
    process.stdout.close()


def test_processes_are_identified_by_their_marks(helper: subprocess.Popen[str]) -> None:
    """A replica by its mark, a rank by its given name; the memory is private memory."""
    by_mark = {usage.name: usage for usage in memory_by_process()}
    assert by_mark["replica-3"].is_ours
    assert 300e6 < by_mark["replica-3"].bytes < 400e6
    assert "driver" in by_mark
    by_name = {usage.name for usage in memory_by_process({helper.pid: "rank 0"})}
    assert "rank 0" in by_name and "replica-3" not in by_name


def test_another_runs_processes_are_not_ours(
    helper: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is neither marked nor a child belongs to another program."""
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive=False: [])
    monkeypatch.setenv(MARK, "another-run")
    assert not any(usage.is_ours and usage.name == "replica-3" for usage in memory_by_process())
    monkeypatch.setenv(MARK, "test-run")
    assert any(usage.is_ours and usage.name == "replica-3" for usage in memory_by_process())


def test_ranks_of_other_nodes_are_left_out() -> None:
    """A process id is only valid on its own node."""
    locations = [
        ActorLocation("a", "h1", (), 11),
        ActorLocation("b", "h2", (), 12),
        ActorLocation("a", "h1", (), 13),
    ]
    assert rank_names(locations, "a") == {11: "rank 0", 13: "rank 2"}


@pytest.mark.parametrize(
    ("name", "is_ours", "advice"),
    [
        ("rank 0", True, "lora_rank"),
        ("replica-0", True, "kv_cache"),
        ("replica-0", False, "another machine"),
        ("python server.py", True, "another machine"),
    ],
)
def test_advice_is_about_the_largest(name: str, is_ours: bool, advice: str) -> None:
    """What to lower depends on the process with most memory; not on a replica of another run."""
    line = describe(HostMemory(100, 5), [Usage(name, 60 * GIB, is_ours), Usage("driver", GIB)])
    assert advice in line.rpartition("to need less: ")[2]


def test_a_lost_rank_gets_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error ends with a recent report; other errors, and losses without one, are unchanged."""
    config = Config()
    config.trainer.memory_watch_seconds = 0
    monkeypatch.setattr(module.HostWatch, "recent_report", "host memory is nearly used up: x")
    explained = r"^rank 1 died; host memory is nearly used up: x$"
    with pytest.raises(RankLost, match=explained), watch_host_memory(config):
        raise RankLost("rank 1 died")
    with pytest.raises(DataError, match=r"^rows$"), watch_host_memory(config):
        raise DataError("rows")
    monkeypatch.setattr(module.HostWatch, "recent_report", None)
    with pytest.raises(RankLost, match=r"^rank 1 died$"), watch_host_memory(config):
        raise RankLost("rank 1 died")


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    """cgroup v2: each enclosing group with a limit counts, and droppable pages are free."""
    (tmp_path / "membership").write_text("0::/outer/inner\n")
    group(tmp_path / "outer", memory__max="1000", memory__current="700",
          memory__stat="anon 600\ninactive_file 50\n")  # fmt: skip
    group(tmp_path / "outer/inner", memory__max="max", memory__current="1", memory__stat="anon 1\n")
    limits = list(control_groups(tmp_path / "membership", tmp_path))
    assert limits == [HostMemory(1000, 350)]


def test_the_limit_of_an_older_container_counts(tmp_path: Path) -> None:
    """cgroup v1: limits are in bytes, and an unlimited group has an enormous one."""
    (tmp_path / "membership").write_text("5:cpu:/a\n4:memory:/a\n")
    group(tmp_path / "memory/a", memory__limit_in_bytes="1000", memory__usage_in_bytes="400",
          memory__stat="total_inactive_file 100\n")  # fmt: skip
    group(tmp_path / "memory", memory__limit_in_bytes=str(2**63 - 4096),
          memory__usage_in_bytes="400", memory__stat="total_inactive_file 0\n")  # fmt: skip
    limits = list(control_groups(tmp_path / "membership", tmp_path))
    assert limits == [HostMemory(1000, 700)]


def test_this_machine_has_memory() -> None:
    """The values read on this machine are plausible."""
    memory = HostMemory.now()
    assert 0 < memory.free <= memory.total <= psutil.virtual_memory().total
    assert 0 <= memory.used_share < 1
