"""An HTTP retriever with log-normal response times; prints its port and serves until killed."""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys

from aiohttp import web

from search_r1.plan.workload import LogNormal


async def serve(p50: float, p99: float, letters: int) -> None:
    """Serve until killed. Each request waits a random time, whatever its number of queries.

    `p50` and `p99`: seconds of a request; `letters`: characters of the document in the response.
    """
    latency, draw = LogNormal(p50, p99), random.Random(0)

    async def retrieve(request: web.Request) -> web.Response:
        queries = (await request.json())["queries"]
        wait = latency.p50 * math.exp(latency.sigma * draw.gauss(0, 1))
        await asyncio.sleep(wait)
        text = "b" * letters
        document = {"id": "1", "title": "t", "text": text, "contents": f"t\n{text}"}
        hits = [{"document": document, "score": 1.0}]
        return web.json_response({"result": [hits for _ in queries]})

    app = web.Application()
    app.router.add_post("/retrieve", retrieve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(json.dumps({"port": runner.addresses[0][1]}), flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
