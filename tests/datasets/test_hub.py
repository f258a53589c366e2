"""Loading sets with `datasets` from a local server with the hub's API, and offline."""

import json
import os
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


def build(out: Path, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script by its path, as a user does, with a separate cache."""
    path = ROOT / "scripts" / "data_process" / "qa_search_test_merge.py"
    command = [sys.executable, str(path), "--data_sources", "nq,hotpotqa", "--local_dir", str(out)]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    settings = {"HF_HOME": str(home), "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        command, env={**inherited, **settings}, capture_output=True, text=True, timeout=120
    )


def test_mirror_then_offline(mirror: str, tmp_path: Path) -> None:
    """Sets are loaded from HF_ENDPOINT; offline, the cache gives a file with the same bytes."""
    fetched = build(tmp_path / "fetched", tmp_path / "home", HF_ENDPOINT=mirror)
    assert fetched.returncode == 0, fetched.stderr
    rows = pyarrow.parquet.read_table(tmp_path / "fetched" / "test.parquet").to_pylist()
    expected = [("nq", row) for row in records("nq", "test")]
    expected += [("hotpotqa", row) for row in records("hotpotqa", "dev")]
    assert [row["id"] for row in rows] == [f"{name}_{row['id']}" for name, row in expected]
    assert [row["golden_answers"] for row in rows] == [r["golden_answers"] for _, r in expected]
    cached = build(tmp_path / "cached", tmp_path / "home", HF_HUB_OFFLINE="1")
    assert cached.returncode == 0, cached.stderr
    online, offline = (tmp_path / name / "test.parquet" for name in ("fetched", "cached"))
    assert online.read_bytes() == offline.read_bytes()


def test_a_missing_hub_is_an_error(tmp_path: Path) -> None:
    """Offline with an empty cache, the error names the mirror and local files as fixes."""
    failed = build(tmp_path / "out", tmp_path / "home", HF_HUB_OFFLINE="1")
    assert failed.returncode == 2
    assert f"{FLASHRAG}/nq/test: got ConnectionError" in failed.stderr
    assert "HF_ENDPOINT" in failed.stderr and "--local_dataset_path" in failed.stderr
    assert "Traceback" not in failed.stderr
