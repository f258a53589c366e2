"""README's *Train your own*, typed as it stands: download, serve, build, train, evaluate.

The hub is a server of this machine with small files under the published names, the trainer and the
engine of the evaluation are stand-ins for what needs a GPU; everything else is what a user runs.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import faiss
import numpy as np
import pytest

from example.tiny import tiny_model
from search_r1.datasets.catalogue import HUB
from search_r1.datasets.download import ITEMS
from tests.datasets.collection import records
from tests.hub import serving_hub
from tests.search.encoders.conftest import SIZES, save_model

ROOT = Path(__file__).resolve().parents[1]
PYTHON = f"""#!/bin/bash
[[ $* != *example.model* ]] || exec mkdir -p models/SmolLM2-135M-Instruct # half a minute
[[ $* != *search_r1.evaluate* ]] || set -- "$@" --engine transformers --num-rows 1 --device cpu
exec {sys.executable} "$@"
"""


def blocks() -> list[str]:
    """The shell blocks of the section, in order."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Train your own")[1]
    return re.findall(r"```bash\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What every training ends with."""
    return str(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """This checkout with a `python` of its own first, and nothing that was built or fetched."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "example", folder / "example", ignore=shutil.ignore_patterns("adapter"))
    for name in ("verl", "search_r1", "scripts", "tests", "retrieval_launch.sh", "train_grpo.sh"):
        (folder / name).symlink_to(ROOT / name)
    binaries = folder / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").write_text(PYTHON)
    (binaries / "python").chmod(0o755)
    (binaries / "activate").write_text(f"PATH={binaries}:$PATH\n")
    return folder


def type_in(block: str, checkout: Path, **variables: str) -> str:
    """Run a block in a shell of its own; what it left running is ended. Returns what was said."""
    port = free_port()
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment |= {"PORT": port, "RETRIEVER_URL": f"http://127.0.0.1:{port}/retrieve"}
    environment |= {"ENTRY": "tests.readme_trainer", "PYTHONPATH": str(checkout), **variables}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    script = block.replace(":8000", f":{port}").replace("sleep 5", "sleep 0.2")
    script = script.replace("search_r1.evaluate", f"search_r1.evaluate --retriever-url "
                            f"http://127.0.0.1:{port}")  # fmt: skip
    log = checkout / "log"
    with log.open("w") as file:
        shell = subprocess.Popen(
            ["bash", "-euc", script], cwd=checkout, env=environment, start_new_session=True,
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            status = shell.wait(300)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            os.killpg(shell.pid, signal.SIGTERM)
    said = log.read_text()
    assert status == 0, said[-4000:]
    return said


def published(folder: Path) -> dict[str, bytes]:
    """What the hub has under the names of the paper's recipe, a few rows of each."""
    rows = [{"id": str(i), "contents": f'"What {i}"\nwhat is nq train {i}.'} for i in range(9)]
    corpus = "".join(json.dumps(row) + "\n" for row in rows).encode()
    index = faiss.IndexFlatIP(SIZES["hidden_size"])
    vectors = np.random.default_rng(0).standard_normal((len(rows), SIZES["hidden_size"]))
    index.add(vectors.astype(np.float32))
    whole = faiss.serialize_index(index).tobytes()
    save_model(folder, "bert")
    model = {f"intfloat/e5-base-v2/{f.name}": f.read_bytes() for f in folder.iterdir()}
    card = ["---", "configs:", "- config_name: nq", "  data_files:"]
    questions = {}
    for split in ("train", "dev", "test"):
        card += [f"  - split: {split}", f"    path: nq/{split}.jsonl"]
        lines = "".join(json.dumps(row) + "\n" for row in records("nq", split))
        questions[f"datasets/{HUB}/nq/{split}.jsonl"] = lines.encode()
    return {
        f"datasets/{ITEMS['corpus'].repo}/wiki-18.jsonl.gz": gzip.compress(corpus),
        f"datasets/{ITEMS['e5'].repo}/part_aa": whole[:100],
        f"datasets/{ITEMS['e5'].repo}/part_ab": whole[100:],
        f"datasets/{HUB}/README.md": "\n".join([*card, "---", ""]).encode(),
        **questions,
        **model,
    }


def test_the_papers_recipe_can_be_typed(checkout: Path, model: str, tmp_path: Path) -> None:
    """wiki-18 and its index arrive, are served, NQ is built, trained on and evaluated."""
    with serving_hub(published(tmp_path / "e5-base-v2")) as address:
        home = str(tmp_path / "home")
        hub = {"HF_ENDPOINT": address, "HF_HOME": home, "STAND_IN_MODEL": model}
        said = type_in(blocks()[0], checkout, **hub)
    assert "stand-in: trained Qwen/Qwen2.5-3B" in said
    assert (checkout / "data" / "wiki-18" / "e5_Flat.index").is_file()
    assert (checkout / "runs" / "evaluation" / "nq" / "metrics.json").is_file()


def test_the_example_world_can_be_typed(checkout: Path, model: str, tmp_path: Path) -> None:
    """The same with what is in the repository, without any hub."""
    alone = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "STAND_IN_MODEL": model}
    said = type_in(blocks()[1], checkout, **alone)
    assert "stand-in: trained models/SmolLM2-135M-Instruct" in said
    assert (checkout / "runs" / "evaluation" / "example" / "metrics.json").is_file()
