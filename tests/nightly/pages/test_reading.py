"""Runs README, quick start and the page about own files unchanged, block by block.

The hub is a local server with small files under the published names. `stand_ins.py` lists the
commands that are replaced, since they need a GPU, hours or a cluster.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

import faiss
import numpy as np
import pytest

from example.tiny import tiny_model
from search_r1.datasets.download import ITEMS
from search_r1.datasets.hub import FLASHRAG
from tests.datasets.collection import records
from tests.hub import serving_hub
from tests.nightly.pages.stand_ins import lay_out
from tests.nightly.pages.terminal import Terminal
from tests.retrieval.encoders.conftest import SIZES, save_model

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """Return a terminal in a fresh checkout, with a tiny model as the result of every training."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    lay_out(ROOT, folder)
    variables = {
        "STAND_IN_MODEL": str(tiny_model(tmp_path / "model")),
        "ENTRY": "tests.nightly.pages.trainer",
        "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "home"),
    }
    started = Terminal(folder, variables)
    yield started
    started.stop()


def published(folder: Path) -> dict[str, bytes]:
    """Return a hub's files for the paper's recipe, with a few rows each."""
    rows = [{"id": str(i), "contents": f'"What {i}"\nwhat is nq train {i}.'} for i in range(9)]
    corpus = "".join(json.dumps(row) + "\n" for row in rows).encode()
    index = faiss.IndexFlatIP(SIZES["hidden_size"])
    vectors = np.random.default_rng(0).standard_normal((len(rows), SIZES["hidden_size"]))
    index.add(vectors.astype(np.float32))
    index_bytes = faiss.serialize_index(index).tobytes()
    save_model(folder, "bert")
    model = {f"intfloat/e5-base-v2/{f.name}": f.read_bytes() for f in folder.iterdir()}
    card = ["---", "configs:", "- config_name: nq", "  data_files:"]
    questions = {}
    for split in ("train", "dev", "test"):
        card += [f"  - split: {split}", f"    path: nq/{split}.jsonl"]
        lines = "".join(json.dumps(row) + "\n" for row in records("nq", split))
        questions[f"datasets/{FLASHRAG}/nq/{split}.jsonl"] = lines.encode()
    return {
        f"datasets/{ITEMS['corpus'].repo}/wiki-18.jsonl.gz": gzip.compress(corpus),
        f"datasets/{ITEMS['e5'].repo}/part_aa": index_bytes[:100],
        f"datasets/{ITEMS['e5'].repo}/part_ab": index_bytes[100:],
        f"datasets/{FLASHRAG}/README.md": "\n".join([*card, "---", ""]).encode(),
        **questions,
        **model,
    }


@pytest.mark.slow
def test_readme(terminal: Terminal, tmp_path: Path) -> None:
    """All blocks from `make demo` to the evaluation of the paper's recipe."""
    with serving_hub(published(tmp_path / "e5-base-v2")) as address:
        terminal.variables |= {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}
        output = terminal.run_page(ROOT / "README.md")
    assert "stand-in: trained Qwen/Qwen2.5-3B" in output
    assert "expected a search server" not in output
    for path in ("data/wiki-18/e5_Flat.index", "runs/evaluation/nq/metrics.json",
                 "runs/from-python/model"):  # fmt: skip
        assert (terminal.checkout / path).exists(), path


@pytest.mark.slow
def test_quick_start(terminal: Terminal) -> None:
    """Model, retriever, training, evaluation and a question work without a hub."""
    output = terminal.run_page(ROOT / "docs" / "start" / "quickstart.md")
    assert "stand-in: trained models/SmolLM2-135M-Instruct" in output
    assert (terminal.checkout / "runs" / "first-evaluation" / "metrics.json").is_file()


@pytest.mark.slow
def test_own_files(terminal: Terminal) -> None:
    """Own questions, texts, reward and tool are used, and the page's search finds its passage."""
    output = terminal.run_page(ROOT / "docs" / "start" / "own.md")
    assert "A sett may be a century old" in output
    assert output.count("stand-in: trained") == 3
