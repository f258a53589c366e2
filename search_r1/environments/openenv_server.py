"""Serve the search task as an OpenEnv environment; docs/guides/rewards.md."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys

from verl.errors import explain

PACKAGE = "openenv==0.10.0"


def main() -> int:
    """Serve the environment until it is interrupted; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--retriever-url", default="http://127.0.0.1:8000/retrieve")
    parser.add_argument("--topk", type=int, default=3, help="documents per search")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8004)
    parser.add_argument("--sessions", type=int, default=256, help="concurrent episodes")
    options = parser.parse_args()
    if importlib.util.find_spec("openenv") is None:
        fix = f"pip install {PACKAGE}, in an environment of its own"
        parser.error(explain("openenv", "no such package", PACKAGE, fix))
    # Slow to import, and the package is optional.
    client = importlib.import_module("search_r1.retrieval.client")
    task = importlib.import_module("search_r1.environments.openenv_task")
    try:
        retrieval = client.RetrievalClient(options.retriever_url, options.topk)
    except ValueError as error:
        parser.error(f"--retriever-url: {error}")
    app = task.build_app(lambda: retrieval, options.sessions)
    importlib.import_module("uvicorn").run(app, host=options.host, port=options.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
