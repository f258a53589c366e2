"""Loading sets with `datasets` from a local server with the hub's API, and offline."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet
import pytest

from search_r1.datasets.hub import FLASHRAG
from tests.datasets.collection import SPLITS, records
from tests.hub import serving_hub

ROOT = Path(__file__).parents[2]


def hub_files() -> dict[str, bytes]:
    """Return the card of the collection, with its configurations, and the files of two sets."""
    card = ["---", "configs:"]
    files = {}
    for name in ("nq", "hotpotqa"):
        card += [f"- config_name: {name}", "  data_files:"]
        for split in SPLITS[name]:
            path = f"{name}/{split}.jsonl"
            card += [f"  - split: {split}", f"    path: {path}"]
            lines = (json.dumps(row) for row in records(name, split))
            files[path] = "\n".join(lines).encode()
    return {"README.md": "\n".join([*card, "---", ""]).encode(), **files}


@pytest.fixture
def mirror() -> Iterator[str]:
    """Yield the address of a local server with the hub's API."""
    files = {f"datasets/{FLASHRAG}/{name}": content for name, content in hub_files().items()}
    with serving_hub(files) as address:
        yield address


def run(home: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a separate cache of the hub."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    settings = {"HF_HOME": str(home), "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, *command], env={**inherited, **settings}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip


OFFLINE = """
import sys
from search_r1.datasets.command import main
for name in ("nq,hotpotqa", "popqa"):
    words = ["qa_search_test_merge", "--data_sources", name, "--local_dir", sys.argv[1]]
    print(main(words), flush=True)
"""


def test_mirror_then_offline(mirror: str, tmp_path: Path) -> None:
    """Sets are loaded from HF_ENDPOINT; offline, the cache gives a file with the same bytes.

    A set that is not in it is an error, which names the mirror and local files as fixes.
    """
    fetched, cached, home = (tmp_path / name for name in ("fetched", "cached", "home"))
    script = ROOT / "scripts" / "data_process" / "qa_search_test_merge.py"  # as a user runs it
    flags = ["--data_sources", "nq,hotpotqa", "--local_dir", str(fetched)]
    done = run(home, str(script), *flags, HF_ENDPOINT=mirror)
    assert done.returncode == 0, done.stderr
    rows = pyarrow.parquet.read_table(fetched / "test.parquet").to_pylist()
    expected = [("nq", row) for row in records("nq", "test")]
    expected += [("hotpotqa", row) for row in records("hotpotqa", "dev")]
    assert [row["id"] for row in rows] == [f"{name}_{row['id']}" for name, row in expected]
    assert [row["golden_answers"] for row in rows] == [r["golden_answers"] for _, r in expected]
    done = run(home, "-c", OFFLINE, str(cached), HF_HUB_OFFLINE="1")
    assert re.findall(r"^\d$", done.stdout, re.MULTILINE) == ["0", "2"], done.stderr
    online, offline = (folder / "test.parquet" for folder in (fetched, cached))
    assert online.read_bytes() == offline.read_bytes()
    assert f"{FLASHRAG}/popqa/test: got " in done.stderr
    assert "HF_ENDPOINT" in done.stderr and "--local_dataset_path" in done.stderr
    assert "Traceback" not in done.stderr
