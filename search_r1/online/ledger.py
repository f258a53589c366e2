"""What requests to a service have cost so far, in a file, and the budget that they may not exceed.

The file is written before a request is sent, and a request is not sent if that fails: a crash may
count a request that was never sent, but none is sent uncounted. Services that do not charge failed
requests ask for less than is counted.
"""

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

from search_r1.retrieval.errors import SetupError, UpstreamRefused
from search_r1.retrieval.settings import OnlineConfig
from search_r1.store import StorageError
from verl.errors import explain

logger = logging.getLogger(__name__)

UNIT = Decimal("1e-6")
"""Amounts are whole numbers of this, so that sums are exact."""
WARN_AT = 0.9
BUSY_S = 30.0
"""Seconds to wait for a lock of another process."""
APPLICATION_ID = 0x5352314C
"""sqlite application id of ledgers, so that no other program's file is counted in."""
TABLE = """CREATE TABLE IF NOT EXISTS spent
  (one INTEGER PRIMARY KEY, amount INTEGER, requests INTEGER)"""
FIRST = "INSERT OR IGNORE INTO spent VALUES (1, 0, 0)"
SPEND = "UPDATE spent SET amount = amount + :price, requests = requests + 1 " \
        "WHERE amount + :price <= :budget"  # fmt: skip


class BudgetSpent(UpstreamRefused):
    """What a service may cost is spent, so that no other query would be answered."""

    status = 402


class Ledger:
    """Counts requests against a budget; several threads and processes may use one file."""

    def __init__(self, path: str, budget: float, price: float) -> None:
        """Create or open the file; raises StorageError."""
        self._path, self._budget, self._price = path, to_units(budget), to_units(price)
        self._lock = threading.Lock()
        self._has_warned = False
        with self._translated():
            is_new = not Path(path).exists() or not Path(path).stat().st_size
            self._file = sqlite3.connect(
                path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            if is_new:
                self._file.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            elif self._file.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
                raise sqlite3.DatabaseError("a file of something else")
            self._file.execute(TABLE)
            self._file.execute(FIRST)
        amount, num_requests = self._read()
        logger.info("spent so far: %s of %s in %d requests (--online_ledger %s)",
                    shown(amount), shown(self._budget), num_requests, path)  # fmt: skip
        if amount + self._price > self._budget:
            logger.warning("%s; only cached answers are served", self._spent())

    def spend(self) -> None:
        """Count one request that is about to be sent; raises BudgetSpent instead of exceeding."""
        values = {"price": self._price, "budget": self._budget}
        with self._lock, self._translated():
            is_counted = self._file.execute(SPEND, values).rowcount == 1
        if not is_counted:
            raise self._spent()
        if not self._has_warned and self._read()[0] >= WARN_AT * self._budget:
            self._has_warned = True
            logger.warning("%s of --online_budget %s are spent", shown(self._read()[0]),
                           shown(self._budget))  # fmt: skip

    def close(self) -> None:
        self._file.close()

    def _read(self) -> tuple[int, int]:
        with self._lock, self._translated():
            amount, num_requests = self._file.execute(
                "SELECT amount, requests FROM spent"
            ).fetchone()
        return amount, num_requests

    def _spent(self) -> BudgetSpent:
        amount, num_requests = self._read()
        return BudgetSpent(explain(
            f"--online_budget {shown(self._budget)}",
            f"{shown(amount)} spent in {num_requests} requests at {shown(self._price)} each",
            "enough for one more request",
            f"raise --online_budget, or begin a new count with another file than "
            f"--online_ledger {self._path}",
        ))  # fmt: skip

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StorageError(
                f"--online_ledger {self._path} cannot be used ({error}), so nothing is sent; "
                "expected a new path in a writable folder, or a file that this option created"
            ) from error


def open_ledger(config: OnlineConfig) -> Ledger | None:
    """Return the ledger of a budget, None without one; raises SetupError for half of the two."""
    if (config.online_budget is None) != (config.online_ledger is None):
        given = "--online_ledger" if config.online_budget is None else "--online_budget"
        raise SetupError(explain(given, "given alone", "--online_budget and --online_ledger",
                                 "give both, or neither"))  # fmt: skip
    if config.online_budget is None or config.online_ledger is None:
        if config.online_price != OnlineConfig.online_price:
            raise SetupError(explain("--online_price", f"{config.online_price:g} without a budget",
                                     "--online_budget too", "give one"))  # fmt: skip
        return None
    return Ledger(config.online_ledger, config.online_budget, config.online_price)


def to_units(amount: float) -> int:
    return int((Decimal(str(amount)) / UNIT).to_integral_value())


def shown(units: int) -> str:
    return f"{(units * UNIT).normalize():f}"
