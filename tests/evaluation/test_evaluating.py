"""Running all rows: kills and resumption, outages, concurrency."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from search_r1.evaluation.dialogues import MAX_FAILURES_IN_A_ROW, run_all
from search_r1.evaluation.store import SAMPLES, Store, read_evaluation
from tests.evaluation.scripted import Reader, finder, row, runner, tasks
from tests.fakes import UnavailableRetriever
from verl.errors import ConfigError, ToolError
from verl.rollout.interface import RolloutEngine
from verl.types import Completion, Sampling

ROWS = [row(i, "nq" if i % 2 else "hotpotqa") for i in range(20)]
MANIFEST = {
    "data": {"num_rows": 20, "files": {}}, "model": {"name": "m"}, "template": {"name": "t"},
    "decoding": {"n": 2, "temperature": 0.0, "max_turns": 2, "topk": 1},
    "retriever": {"retriever": "empty"},
}  # fmt: skip


@dataclass
class KillingReader(Reader):
    """A policy that kills its process after `last` requests."""

    last: int = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        if len(self.requests) == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().generate(prompt_ids, sampling)


def evaluate(folder: Path, engine: RolloutEngine, concurrency: int = 4) -> int:
    """Run the missing dialogues of two samples per row, and return their number."""
    with Store(folder, MANIFEST) as store:
        missing = [task for task in tasks(ROWS, 2) if task.key not in store.finished]
        asyncio.run(run_all(missing, runner(finder(ROWS)), engine, store, concurrency))
    return len(missing)


def test_a_killed_evaluation_goes_on_where_it_was(tmp_path: Path) -> None:
    """After a kill, only missing dialogues are run, and the samples equal those of one run."""
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=evaluate, args=(tmp_path / "killed", KillingReader(last=31)))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    done = (tmp_path / "killed" / SAMPLES).read_bytes().count(b"\n")
    assert 13 <= done < 16  # two requests per dialogue, four concurrent dialogues
    with (tmp_path / "killed" / SAMPLES).open("ab") as file:
        file.write(b'{"uid": "rows.jsonl#3", "sam')
    assert evaluate(tmp_path / "killed", Reader()) == 40 - done
    evaluate(tmp_path / "whole", Reader())
    resumed, whole = (
        {s.key: s for s in read_evaluation(tmp_path / name)[1]} for name in ("killed", "whole")
    )
    assert resumed == whole
    assert len(whole) == 40
    assert evaluate(tmp_path / "whole", KillingReader(last=0)) == 0


def test_every_row_is_scored(tmp_path: Path) -> None:
    """Every row is scored twice, with any concurrency."""
    for concurrency in (1, 7, 100):
        folder = tmp_path / str(concurrency)
        evaluate(folder, Reader(), concurrency)
        _, samples = read_evaluation(folder)
        assert sorted(s.key for s in samples) == sorted(t.key for t in tasks(ROWS, 2))
        assert all(s.em == 1.0 for s in samples)


def test_an_outage_stops_the_evaluation(tmp_path: Path) -> None:
    """An outage stops the evaluation early, and a restart runs all failed dialogues again."""
    with Store(tmp_path, MANIFEST) as store, pytest.raises(ToolError):
        asyncio.run(run_all(tasks(ROWS, 2), runner(UnavailableRetriever()), Reader(), store, 2))
    assert MAX_FAILURES_IN_A_ROW <= len(store.finished) < 40
    assert evaluate(tmp_path, Reader()) == 40


@dataclass
class RefusingReader(Reader):
    """An endpoint that refuses every request."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        raise ConfigError("endpoint: got 401")


def test_an_engine_that_refuses_is_one_message(tmp_path: Path) -> None:
    """A common error of all workers is raised once, not as an exception group."""
    with Store(tmp_path, MANIFEST) as store, pytest.raises(ConfigError, match="got 401"):
        asyncio.run(run_all(tasks(ROWS), runner(finder(ROWS)), RefusingReader(), store, 8))
