"""A budget that stops requests: by amount, over restarts, threads and processes, told by name."""

import multiprocessing
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from search_r1.online.ledger import BudgetSpent, Ledger, open_ledger, shown, to_units
from search_r1.retrieval.command import main
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.settings import OnlineConfig
from search_r1.store import StorageError


def spend_all(path: Path, budget: float, price: float) -> int:
    ledger, num_sent = Ledger(str(path), budget, price), 0
    try:
        while True:
            ledger.spend()
            num_sent += 1
    except BudgetSpent as error:
        assert "--online_budget" in str(error) and "--online_ledger" in str(error)
        return num_sent
    finally:
        ledger.close()


@pytest.mark.parametrize(("budget", "price", "expected"), [(3, 1, 3), (0.3, 0.1, 3), (1, 0.3, 3),
                                                           (0.5, 1, 0), (0, 1, 0)])  # fmt: skip
def test_requests_fit_into_the_budget(
    tmp_path: Path, budget: float, price: float, expected: int
) -> None:
    """As many as it pays for, exactly in decimals; a restart finds what was spent."""
    assert spend_all(tmp_path / "l", budget, price) == expected
    assert spend_all(tmp_path / "l", budget, price) == 0
    assert spend_all(tmp_path / "l", expected * price + price, price) == 1


def _spend(path: Path, budget: int, counts: Any) -> None:
    counts.put(spend_all(path, budget, 1))


def test_processes_share_a_budget(tmp_path: Path) -> None:
    """Together they send what it pays for."""
    context = multiprocessing.get_context("spawn")
    counts = context.Queue()
    processes = [context.Process(target=_spend, args=(tmp_path / "l", 400, counts)) for _ in "ab"]
    for process in processes:
        process.start()
    assert sum(counts.get(timeout=60) for _ in processes) == 400
    for process in processes:
        process.join()


def test_a_file_of_something_else_is_not_counted_in(tmp_path: Path) -> None:
    """Text, another program's database, which stays as it is, and no folder."""
    (tmp_path / "text").write_text("not a database " * 100)
    other = sqlite3.connect(tmp_path / "other")
    other.execute("CREATE TABLE a (b)")
    for name in ("text", "other", "no/folder"):
        with pytest.raises(StorageError, match="--online_ledger"):
            Ledger(str(tmp_path / name), 1, 1)
    tables = other.execute("SELECT name FROM sqlite_master").fetchall()
    other.close()
    assert tables == [("a",)]


def test_nothing_is_sent_uncounted(tmp_path: Path) -> None:
    """A ledger that fails in use is an error."""
    ledger = Ledger(str(tmp_path / "l"), 9, 1)
    other = sqlite3.connect(tmp_path / "l", isolation_level=None)
    other.execute("DROP TABLE spent")
    other.close()
    with pytest.raises(StorageError, match="nothing is sent"):
        ledger.spend()
    ledger.close()


@pytest.mark.parametrize("config", [OnlineConfig(online_budget=1.0), OnlineConfig(online_price=2.0),
                                    OnlineConfig(online_ledger="x")])  # fmt: skip
def test_half_a_budget_is_refused(config: OnlineConfig) -> None:
    """A budget without a file would begin anew at each start."""
    with pytest.raises(SetupError, match="--online_"):
        open_ledger(config)


def test_without_a_budget_there_is_no_ledger() -> None:
    """And amounts are shown as they were given."""
    assert open_ledger(OnlineConfig()) is None
    assert [shown(to_units(x)) for x in (1000, 0.005, 2.5)] == ["1000", "0.005", "2.5"]


def test_the_command_line_names_the_missing_half(capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is sent."""
    argv = ["--retriever_name", "serper", "--online_budget", "5", "--port", "0"]
    assert main(argv) != 0
    assert "--online_ledger" in capsys.readouterr().err
