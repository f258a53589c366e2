"""Serve a verifiers taskset to training runs, or write its tasks as rows; docs/guides/rewards.md.

Runs in an environment with verifiers 0.4, which needs other versions of packages than training.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from verl.errors import explain

PACKAGE = "verifiers==0.4.0"
ALIASES = str(Path(__file__).resolve().parents[1] / "compat")
"""Where `search_r1_task` is, in a checkout."""


def main() -> int:
    """Serve until interrupted, or write the rows; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("taskset", help="id of an installed taskset, such as search_r1_task")
    parser.add_argument("--taskset-options", default="{}", help="its options, as JSON")
    parser.add_argument("--harness", default="", help="id; default: the taskset's own, else bash")
    parser.add_argument("--harness-options", default="{}", help="its options, as JSON")
    parser.add_argument(
        "--runtime", default="subprocess", help="of the harness: subprocess, docker …"
    )
    parser.add_argument("--address", default="tcp://127.0.0.1:8005")
    parser.add_argument("--rows", type=Path, help="write the tasks to this .jsonl file, and end")
    parser.add_argument("--limit", type=int, help="write at most so many")
    options = parser.parse_args()
    if importlib.util.find_spec("verifiers") is None:
        fix = f"pip install {PACKAGE}, in an environment of its own"
        parser.error(explain("verifiers", "no such package", PACKAGE, fix))
    sys.path.append(ALIASES)
    values = {}
    for name in ("taskset_options", "harness_options"):
        try:
            values[name] = dict(json.loads(getattr(options, name)))
        except (ValueError, TypeError) as error:
            parser.error(f"--{name.replace('_', '-')}: {error}; expected a JSON object")
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    harness = options.harness or loaders.default_harness_id(options.taskset)
    agent = {"harness": {"id": harness, **values["harness_options"]},
             "runtime": {"type": options.runtime}}  # fmt: skip
    taskset = {"id": options.taskset, **values["taskset_options"]}
    try:
        config = loaders.resolve_env_config({"taskset": taskset, "agent": agent})
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    if options.rows is None:
        server = importlib.import_module("verifiers.v1.serve").EnvServer(config, options.address)
        sys.stderr.write(f"{options.taskset} is served at {server.address}\n")
        asyncio.run(server.run())
        return 0
    tasks = islice(loaders.load_taskset(config.taskset), options.limit)
    with options.rows.open("w", encoding="utf-8") as file:
        for row in rows_of(options.taskset, tasks):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return 0


def rows_of(taskset: str, tasks: Iterator[Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of training data whose `extra_info.task` is what the server plays."""
    for task in tasks:
        data = task.data.model_dump(mode="json", exclude_none=True)
        text = task.data.prompt_text or "(the environment begins)"
        answers = data.get("answers") or [data.get("answer") or "(scored by the environment)"]
        yield {
            "data_source": taskset,
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"ground_truth": {"target": [str(answer) for answer in answers]}},
            "extra_info": {"question": data.get("question") or text, "task": json.dumps(data)},
        }


if __name__ == "__main__":
    sys.exit(main())
