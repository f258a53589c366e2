"""Playing all rows: killed in the middle and gone on with, outages, concurrency."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from search_r1.evaluation.running import MAX_FAILURES_IN_A_ROW, play_all
from search_r1.evaluation.store import SAMPLES, Store, read_evaluation
from search_r1.search.client import Document
from search_r1.search.errors import RetrieverUnavailable
from tests.evaluation.worlds import Reader, finder, row, runner, tasks
from verl.errors import ConfigError, ToolError
from verl.rollout.interface import RolloutEngine
from verl.types import Completion, Sampling

ROWS = [row(i, "nq" if i % 2 else "hotpotqa") for i in range(20)]
WHAT = {
    "data": {"num_rows": 20, "files": {}}, "model": {"name": "m"}, "template": {"name": "t"},
    "decoding": {"n": 2, "temperature": 0.0, "max_turns": 2, "topk": 1},
    "retriever": {"retriever": "empty"},
}  # fmt: skip


@dataclass
class Mortal(Reader):
    """A policy whose process is killed at its n-th request."""

    last: int = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        if len(self.requests) == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().generate(prompt_ids, sampling)


def evaluate(folder: Path, engine: RolloutEngine, concurrency: int = 4) -> int:
    """Play what is missing of two samples a row; returns how many dialogues that were."""
    with Store(folder, WHAT) as store:
        missing = [task for task in tasks(ROWS, 2) if task.key not in store.finished]
        asyncio.run(play_all(missing, runner(finder(ROWS)), engine, store, concurrency))
    return len(missing)


def test_a_killed_evaluation_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed without warning; the rest is played once, and all is as if it had never happened."""
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=evaluate, args=(tmp_path / "killed", Mortal(last=31)))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    done = (tmp_path / "killed" / SAMPLES).read_bytes().count(b"\n")
    assert 13 <= done < 16  # two requests a dialogue, four dialogues at once
    with (tmp_path / "killed" / SAMPLES).open("ab") as file:
        file.write(b'{"uid": "rows.jsonl#3", "sam')
    assert evaluate(tmp_path / "killed", Reader()) == 40 - done
    evaluate(tmp_path / "whole", Reader())
    resumed, whole = (
        {s.key: s for s in read_evaluation(tmp_path / name)[1]} for name in ("killed", "whole")
    )
    assert resumed == whole
    assert len(whole) == 40
    assert evaluate(tmp_path / "whole", Mortal(last=0)) == 0


def test_every_row_is_scored(tmp_path: Path) -> None:
    """Each row twice, whatever the concurrency, all correct."""
    for concurrency in (1, 7, 100):
        folder = tmp_path / str(concurrency)
        evaluate(folder, Reader(), concurrency)
        _, samples = read_evaluation(folder)
        assert sorted(s.key for s in samples) == sorted(t.key for t in tasks(ROWS, 2))
        assert all(s.em == 1.0 for s in samples)


class Away:
    """A retriever that went away for good."""

    async def search(self, query: str) -> list[Document]:
        raise RetrieverUnavailable("no server")


def test_an_outage_stops_the_evaluation(tmp_path: Path) -> None:
    """Not every row is failed: it stops with the reason, and a restart plays all of them."""
    with Store(tmp_path, WHAT) as store, pytest.raises(ToolError, match="no server"):
        asyncio.run(play_all(tasks(ROWS, 2), runner(Away()), Reader(), store, 2))
    assert MAX_FAILURES_IN_A_ROW <= len(store.finished) < 40
    assert evaluate(tmp_path, Reader()) == 40


@dataclass
class Refusing(Reader):
    """An endpoint that refuses."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        raise ConfigError("endpoint: got 401")


def test_an_engine_that_refuses_is_one_message(tmp_path: Path) -> None:
    """The workers' common error, not a group of them."""
    with Store(tmp_path, WHAT) as store, pytest.raises(ConfigError, match="got 401"):
        asyncio.run(play_all(tasks(ROWS), runner(finder(ROWS)), Refusing(), store, 8))
