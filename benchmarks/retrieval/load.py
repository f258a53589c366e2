"""A light load generator in a separate process: `python -m benchmarks.retrieval.load --help`.

Each of N clients sends its next request when the previous one is answered. Mode `raw` writes
prepared bytes to keep-alive connections; mode `client` searches with RetrievalClient, as training
does. Responses are stored unparsed and checked after the measurement.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from benchmarks.retrieval.figures import percentile
from search_r1.retrieval.client import RetrievalClient
from search_r1.retrieval.errors import SearchError

with contextlib.suppress(ImportError):
    import uvloop

    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())

REPOSITORY = Path(__file__).resolve().parents[2]
HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True)
class RawResponse:
    """The response to one request; status 0 means that the connection was lost."""

    seconds: float
    status: int
    body: bytes


@dataclass(frozen=True)
class LoadReport:
    """Result of one run of the generator."""

    num_queries: int
    num_errors: int
    """Requests without a complete answer: refused, lost, or documents missing."""
    seconds: float
    cpu_seconds: float
    """Processor time of the generator itself."""
    latencies: list[float]
    """Seconds per complete request."""
    answers: list[list[Any] | None]
    """`result` of each request in order, None for an error; empty in mode `client`."""
    first_error: str = ""

    @cached_property
    def rate(self) -> float:
        """Answered queries per second."""
        return self.num_queries / self.seconds

    def latency(self, percent: float) -> float:
        """Return a percentile of the latencies in seconds."""
        return percentile(self.latencies, percent)


class _Connection(asyncio.Protocol):
    """A keep-alive connection that sends a request as soon as the previous one is answered."""

    def __init__(
        self, requests: Iterator[tuple[int, bytes]], record: Callable[[int, RawResponse], None]
    ) -> None:
        self._requests = requests
        self._record = record
        self._index: int | None = None
        self._buffer = bytearray()
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send_next()

    def _send_next(self) -> None:
        self._index, data = next(self._requests, (None, b""))
        if self._index is None:
            self._transport.close()
            return
        self._buffer.clear()
        self._began = time.perf_counter()
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            response = read_response(self._buffer)
        except ValueError as error:
            response = (0, str(error).encode())
        if response is not None and self._index is not None:
            status, body = response
            seconds = time.perf_counter() - self._began
            self._record(self._index, RawResponse(seconds, status, body))
            self._send_next()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._index is not None:
            seconds = time.perf_counter() - self._began
            self._record(self._index, RawResponse(seconds, 0, str(exc).encode()))
        self.closed.set_result(None)


def read_response(buffer: bytearray) -> tuple[int, bytes] | None:
    """Return status and body once they are complete, else None.

    Raises ValueError for a response without Content-Length, whose end would be unknown.
    """
    head_end = buffer.find(HEAD_END)
    if head_end < 0:
        return None
    head = bytes(buffer[:head_end]).lower()
    _, header, rest = head.partition(b"content-length:")
    if not header:
        raise ValueError(f"response without Content-Length: {head[:200]!r}")
    body_start = head_end + len(HEAD_END)
    body_end = body_start + int(rest.split(b"\r\n", 1)[0])
    if len(buffer) < body_end:
        return None
    return int(head.split(b" ", 2)[1]), bytes(buffer[body_start:body_end])


def render_request(url: str, queries: Sequence[str], topk: int) -> bytes:
    """Return the bytes of one `POST /retrieve`."""
    body = json.dumps({"queries": list(queries), "topk": topk, "return_scores": True}).encode()
    head = (
        f"POST /retrieve HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def send_all(
    url: str,
    requests: Iterator[tuple[int, bytes]],
    record: Callable[[int, RawResponse], None],
    num_clients: int,
) -> None:
    """Send numbered requests over `num_clients` connections until there are no more.

    `record` is called with the number and the response of each request.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    loop = asyncio.get_running_loop()
    pairs = [
        await loop.create_connection(lambda: _Connection(requests, record), host, port)
        for _ in range(num_clients)
    ]
    await asyncio.gather(*(connection.closed for _, connection in pairs))


def complete_result(body: bytes, num_queries: int, topk: int) -> list[Any] | None:
    """Return `result` if every query has `topk` documents with contents, else None."""
    try:
        result = json.loads(body)["result"]
        is_complete = len(result) == num_queries and all(
            len(hits) == topk and all(hit["document"]["contents"] for hit in hits)
            for hits in result
        )
    except (ValueError, KeyError, TypeError):
        return None
    return result if is_complete else None


def run_raw(url: str, batches: Sequence[Sequence[str]], clients: int, topk: int) -> LoadReport:
    """Send one request per batch of queries over raw connections."""
    requests = [render_request(url, batch, topk) for batch in batches]
    responses: dict[int, RawResponse] = {}
    numbered = iter(list(enumerate(requests)))
    began, began_cpu = time.perf_counter(), time.process_time()
    asyncio.run(send_all(url, numbered, responses.__setitem__, min(clients, len(requests))))
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    results = [
        complete_result(responses[i].body, len(batch), topk) if i in responses else None
        for i, batch in enumerate(batches)
    ]
    failed = [i for i, result in enumerate(results) if result is None]
    first = responses.get(failed[0]) if failed else None
    return LoadReport(
        sum(len(b) for b, result in zip(batches, results, strict=True) if result is not None),
        len(failed),
        seconds,
        cpu_seconds,
        [responses[i].seconds for i, result in enumerate(results) if result is not None],
        results,
        f"{first.status}: {first.body[:200]!r}" if first else "",
    )


def run_client(url: str, queries: Sequence[str], clients: int, topk: int) -> LoadReport:
    """Search each query with RetrievalClient, from `clients` coroutines."""
    latencies: list[float] = []
    errors: list[str] = []
    remaining = iter(queries)  # shared by all coroutines

    async def search_all(client: RetrievalClient) -> None:
        for query in remaining:
            began = time.perf_counter()
            try:
                hits = await client.search(query)
            except SearchError as error:
                errors.append(str(error))
                continue
            seconds = time.perf_counter() - began
            if len(hits) == topk:
                latencies.append(seconds)
            else:
                errors.append(f"{len(hits)} documents, expected {topk}")

    async def run() -> None:
        async with RetrievalClient(url, topk) as client:
            await asyncio.gather(*(search_all(client) for _ in range(clients)))

    began, began_cpu = time.perf_counter(), time.process_time()
    asyncio.run(run())
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    first = errors[0] if errors else ""
    return LoadReport(len(latencies), len(errors), seconds, cpu_seconds, latencies, [], first)


def run_load(
    url: str,
    queries: Sequence[str],
    *,
    clients: int = 64,
    mode: str = "raw",
    topk: int = 3,
    batch: int = 1,
    timeout: float = 900.0,
) -> LoadReport:
    """Run the generator in a separate process and return its report."""
    with tempfile.TemporaryDirectory(prefix="load-") as folder:
        queries_file, out = Path(folder) / "queries.json", Path(folder) / "report.json"
        queries_file.write_text(json.dumps(list(queries)))
        command = [sys.executable, "-m", "benchmarks.retrieval.load", "--url", url, "--mode", mode]
        command += ["--queries", str(queries_file), "--out", str(out), "--clients", str(clients)]
        command += ["--topk", str(topk), "--batch", str(batch)]
        subprocess.run(command, check=True, cwd=REPOSITORY, timeout=timeout)
        return LoadReport(**json.loads(out.read_text()))


def main(argv: list[str] | None = None) -> int:
    """Run the generator and write its report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.retrieval.load", description=__doc__)
    parser.add_argument("--url", required=True, help="base URL of the server")
    parser.add_argument("--queries", type=Path, required=True, help="JSON list of queries")
    parser.add_argument("--out", type=Path, required=True, help="receives the report as JSON")
    parser.add_argument("--clients", type=int, default=64, help="connections or coroutines")
    parser.add_argument("--mode", choices=("raw", "client"), default="raw")
    parser.add_argument("--topk", type=int, default=3, help="documents per query")
    parser.add_argument("--batch", type=int, default=1, help="queries per request (raw)")
    args = parser.parse_args(argv)
    queries = json.loads(args.queries.read_text())
    if args.mode == "client":
        report = run_client(args.url, queries, args.clients, args.topk)
    else:
        batches = [queries[i : i + args.batch] for i in range(0, len(queries), args.batch)]
        report = run_raw(args.url, batches, args.clients, args.topk)
    args.out.write_text(json.dumps(asdict(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
