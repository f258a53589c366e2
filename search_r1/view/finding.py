"""What is asked of an index: filters, order and page, as one SQL query."""

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from fastapi import Query

from search_r1.view.index import TrajectoryIndex

Order = Literal["newest", "oldest", "score_low", "score_high", "searches_most", "log_prob_low"]
ORDERS: dict[str, str] = {
    "newest": "step DESC, kind, line",
    "oldest": "step, kind, line",
    "score_low": "score, step DESC",
    "score_high": "score DESC, step DESC",
    "searches_most": "searches DESC, step DESC",
    "log_prob_low": "log_prob IS NULL, log_prob, step DESC",
}
SHOWN = ('kind, step, line, uid, source, "group", sample, status, score, searches, turns, tokens, '
         "log_prob, question, answer, gold, queries, is_found, is_given")  # fmt: skip
MOST = 2**31
Whole = Annotated[int, Query(ge=0, le=MOST)]
Count = Annotated[int | None, Query(ge=0, le=MOST)]
OUTCOMES = {
    "given": "is_given = 1",
    "missed": "is_found = 1 AND is_given = 0",
    "not_found": "is_found = 0 AND is_given = 0",
    "known": "is_found = 0 AND is_given = 1",
}
"""missed: the answer stood in the documents and was not given; known: given, though not found."""


@dataclass(frozen=True)
class Wanted:
    """Which trajectories are wanted; None or an empty text asks for nothing."""

    words: Annotated[str, Query(max_length=500)] = ""
    """Each word occurs in the question, in a query or in the answer."""
    kind: str = ""
    status: str = ""
    source: str = ""
    group: str = ""
    uid: str = ""
    outcome: Literal["", "given", "missed", "not_found", "known"] = ""
    step_from: Count = None
    step_to: Count = None
    score_from: float | None = None
    score_to: float | None = None
    searches_from: Count = None
    searches_to: Count = None
    order: Order = "newest"
    page: Annotated[int, Query(ge=1, le=MOST)] = 1
    size: Annotated[int, Query(ge=1, le=200)] = 50

    def condition(self) -> tuple[str, list[Any]]:
        """The WHERE clause and its values."""
        parts, values = [], []
        for field in fields(self):
            value, (name, _, end) = getattr(self, field.name), field.name.partition("_")
            if end in ("from", "to") and value is not None:
                parts.append(f"{name} {'>=' if end == 'from' else '<='} ?")
                values.append(value)
        for name in ("kind", "status", "source", "group", "uid"):
            if getattr(self, name):
                parts.append(f'"{name}" = ?')
                values.append(getattr(self, name))
        for word in self.words.split():
            parts.append("instr(words, ?)")
            values.append(word.casefold())
        if self.outcome:
            parts.append(OUTCOMES[self.outcome])
        return " AND ".join(parts) or "1", values


def find(index: TrajectoryIndex, wanted: Wanted) -> dict[str, Any]:
    """One page of what is wanted, and how many there are in all."""
    where, values = wanted.condition()
    order = ORDERS[wanted.order]
    # All ids in one pass, which tells the count too; in one row, since each row would wait for
    # the interpreter anew while another thread reads files.
    # sqlite by itself takes the narrower by_newest, and then reads every row for its words.
    by = "INDEXED BY by_words" if wanted.words.split() and wanted.order == "newest" else ""
    inner = f"SELECT id FROM trajectories {by} WHERE {where} ORDER BY {order} LIMIT -1"
    [joined] = index.kept(f"SELECT group_concat(id) FROM ({inner})", tuple(values))
    ids = joined.split(",") if joined else []
    pages = max(1, math.ceil(len(ids) / wanted.size))
    page = min(wanted.page, pages)
    own = ids[(page - 1) * wanted.size : page * wanted.size]
    rows = index.db.execute(
        f"SELECT {SHOWN} FROM trajectories WHERE id IN ({', '.join('?' * len(own))}) "
        f"ORDER BY {order}", own)  # fmt: skip
    return {"count": len(ids), "page": page, "pages": pages, "rows": [dict(row) for row in rows]}


def over_steps(index: TrajectoryIndex, uid: str, kind: str, most: int) -> list[dict[str, Any]]:
    """One question's trajectories in the order of the steps, at most `most` spread over them."""
    where = "uid = ? AND (? = '' OR kind = ?)"
    rows = index.db.execute(
        f"SELECT {SHOWN} FROM trajectories WHERE {where} ORDER BY step, kind DESC, line",
        (uid, kind, kind)).fetchall()  # fmt: skip
    chosen = sorted({round(i * (len(rows) - 1) / max(1, most - 1)) for i in range(most)})
    return [dict(rows[i]) for i in (chosen if len(rows) > most else range(len(rows)))]
