"""README's commands for an empty folder: from a wheel in a new environment to a trained policy."""

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.nightly.pages.terminal import Terminal, blocks

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_three_commands_train_a_policy(tmp_path: Path) -> None:
    """Installed by pip alone, without vLLM; `Terminal` gives a block 400 seconds."""
    (block,) = (text for language, text in blocks(ROOT / "README.md") if language == "sh")
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), "."]
    subprocess.run(build, cwd=ROOT, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    install = [str(environment / "bin" / "pip"), "install", "-q", str(wheel)]
    subprocess.run(install, check=True, timeout=1800)

    folder = tmp_path / "empty"
    folder.mkdir()
    terminal = Terminal(folder, {"PATH": f"{environment}/bin:{os.environ['PATH']}"})
    block = block.replace("serve-retriever", f"serve-retriever --port {terminal.port}")
    url = f"retriever.url=http://127.0.0.1:{terminal.port}/retrieve"
    try:
        terminal.run_checked(re.sub(r"(--config-name \w+)", rf"\1 {url}", block))
    finally:
        terminal.stop()
    lines = (folder / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    scores = [row["val/em"] for row in map(json.loads, lines) if "val/em" in row]
    assert scores[-1] > scores[0] + 0.5, scores
