"""A stand-in that speaks the documented wire of Elasticsearch 8 and OpenSearch 2, for tests.

It knows the requests that `elastic.py` sends and refuses all others. No real server was at hand.
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

SHARDS = {"total": 1, "successful": 1, "skipped": 0, "failed": 0}
Answer = tuple[int, Any]


class Wire:
    """Indexes in memory; `fail(path)` may give another answer to any request."""

    def __init__(self, version: dict[str, str], fail: Callable[[str], Answer | None]) -> None:
        self._version, self._fail = version, fail
        self.mappings: dict[str, dict[str, Any]] = {}
        self.rows: dict[str, dict[int, dict[str, Any]]] = {}
        self.headers: list[str | None] = []
        methods = ["GET", "POST", "PUT"]
        self.app = Starlette(routes=[Route("/{path:path}", self._answer, methods=methods)])

    async def _answer(self, request: Request) -> JSONResponse:
        self.headers.append(request.headers.get("Authorization"))
        lines = [json.loads(line) for line in (await request.body()).splitlines() if line]
        index, _, action = request.url.path.strip("/").partition("/")
        failed = self._fail(request.url.path)
        status, answer = failed or self._respond(request.method, index, action, lines)
        return JSONResponse(answer, status)

    def _respond(self, method: str, index: str, action: str, lines: list[Any]) -> Answer:
        if not index:
            return 200, {"version": self._version, "tagline": "You Know, for Search"}
        if method == "PUT":
            self.mappings[index], self.rows[index] = lines[0]["mappings"], {}
            return 200, {"acknowledged": True}
        if index not in self.rows:
            return 404, {"error": {"type": "index_not_found_exception"}, "status": 404}
        rows = self.rows[index]
        if action == "_mapping":
            return 200, {index: {"mappings": self.mappings[index]}}
        if action in ("_refresh", "_flush"):
            return 200, {"_shards": SHARDS}
        if action == "_bulk":
            for order, fields in zip(lines[::2], lines[1::2], strict=True):
                rows[int(order["index"]["_id"])] = fields
            return 200, {"errors": False, "items": []}
        if action == "_count":
            limit = lines[0]["query"].get("range", {"row": {"lt": 10**9}})["row"]["lt"]
            return 200, {"count": sum(row < limit for row in rows), "_shards": SHARDS}
        if action == "_delete_by_query":
            first = lines[0]["query"]["range"]["row"]["gte"]
            self.rows[index] = {row: fields for row, fields in rows.items() if row < first}
            return 200, {"failures": []}
        if action == "_mget":
            ids = lines[0]["ids"]
            return 200, {
                "docs": [{"_id": id, "found": True, "_source": rows[int(id)]} for id in ids]
            }
        assert action == "_msearch", action
        return 200, {"responses": [self._search(rows, body) for body in lines[1::2]]}

    def _search(self, rows: dict[int, dict[str, Any]], body: dict[str, Any]) -> dict[str, Any]:
        scores = {row: self._score(fields, body) for row, fields in rows.items()}
        best = sorted((-score, row) for row, score in scores.items() if score > 0)[: body["size"]]
        hits = [{"_id": str(row), "_score": -score, "_source": rows[row]} for score, row in best]
        return {"hits": {"hits": hits}, "timed_out": False, "_shards": SHARDS, "status": 200}

    def _score(self, fields: dict[str, Any], body: dict[str, Any]) -> float:
        """Return a score: 1 or 0 for a term, the number of words, or that of an inner product."""
        query = body.get("query", {})
        if "term" in query:
            return float(fields["id"] == query["term"]["id"])
        if "match" in query:
            words = query["match"]["contents"].lower().split()
            return float(sum(fields["contents"].lower().count(word) for word in words))
        if "knn" in body:
            vector = body["knn"]["query_vector"]
        elif "knn" in query:
            vector = query["knn"]["vector"]["vector"]
        else:
            vector = query["script_score"]["script"]["params"]["query_value"]
        product = float(np.dot(np.float32(vector), np.float32(fields["vector"])))
        return 1 + product if product >= 0 else 1 / (1 - product)
