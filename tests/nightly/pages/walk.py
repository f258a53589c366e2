"""Runs the commands of a quick start as a reader does, and measures the time of each.

`python -m tests.nightly.pages.walk original --out DIR` runs the quick start in the original's
README unchanged, then the replacements in docs/start/migration.md, with small files on a local hub.
`python -m tests.nightly.pages.walk here --out DIR` runs docs/start/quickstart.md with the real
model, trainer and engine, but without the installation and with fewer training steps. Both print
table rows: command, seconds, exit status and last line of the output.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.hub import serving_hub
from tests.nightly.pages.stand_ins import lay_out
from tests.nightly.pages.terminal import Terminal, blocks
from tests.nightly.pages.test_reading import published

ROOT = Path(__file__).resolve().parents[3]
STEPS = 2
"""Training steps, instead of the quick start's 20."""
ORIGINAL = """
python scripts/download.py --save_path data/wiki-18
cat data/wiki-18/part_* > data/wiki-18/e5_Flat.index
gzip -d data/wiki-18/wiki-18.jsonl.gz
python scripts/data_process/nq_search.py
bash retrieval_launch.sh &
bash train_ppo.sh
python infer.py
"""
REPLACEMENTS = """
RETRIEVER_NAME=e5 RETRIEVER_MODEL=intfloat/e5-base-v2 CORPUS_PATH=data/wiki-18/wiki-18.jsonl \\
  INDEX_PATH=data/wiki-18/e5_Flat.index bash retrieval_launch.sh &
until curl -sf http://127.0.0.1:8000/health; do sleep 1; done
bash train_ppo.sh --cfg job
python infer.py "what is nq train 3?" --model models/none
"""


def commands(block: str) -> list[str]:
    """Return the commands of a block, each with its continuation lines."""
    parts = re.split(r"(?<!\\)\n", block.strip())
    return [part for part in parts if part and not part.startswith("#")]


def walk(terminal: Terminal, typed: Sequence[str]) -> Iterator[str]:
    """Run commands and yield a table row for each."""
    for command in typed:
        start = time.perf_counter()
        status, output = terminal.run(command.replace("TOTAL_STEPS=20", f"TOTAL_STEPS={STEPS}"))
        seconds = time.perf_counter() - start
        with (terminal.checkout.parent / "output.txt").open("a") as file:
            file.write(f"$ {command}\n{output}\n")
        lines = "\n".join(
            line for line in output.strip().splitlines() if " INFO serving " not in line
        )
        shown = re.sub(r"\s*\\\n\s*", " ", command).replace("|", r"\|")
        last = re.sub(r"\s+", " ", lines.rpartition("\n")[2]).replace("|", r"\|")
        yield f"| `{shown}` | {seconds:.1f} s | {status} | {last[:300]} |"


def main() -> None:
    """Create a checkout if there is none, run the commands and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("original", "here"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkout")
    options = parser.parse_args()
    folder = options.out.resolve() / "checkout"
    if not folder.exists():
        folder.mkdir(parents=True)
        lay_out(ROOT, folder)
        for name in ("python", "make"):
            (folder / ".venv" / "bin" / name).unlink()
        python = f'#!/bin/bash\nexec {sys.executable} "$@"\n'
        for name, text in (("python", python), ("make", "#!/bin/bash\necho installed before\n")):
            (folder / ".venv" / "bin" / name).write_text(text)
            (folder / ".venv" / "bin" / name).chmod(0o755)
    with serving_hub(published(folder.parent / "encoder")) as hub:
        variables = {"PATH": f"{folder}/.venv/bin:{os.environ['PATH']}", "PYTHONPATH": str(folder),
                     "HF_ENDPOINT": hub, "HF_HOME": str(folder.parent / "home")}  # fmt: skip
        terminal = Terminal(folder, variables)
        terminal.port = "8000"
        try:
            pages = {"original": [ORIGINAL, REPLACEMENTS], "here": quick_start()}
            for block in pages[options.part]:
                for row in walk(terminal, commands(block)):
                    sys.stdout.write(row + "\n")
                    sys.stdout.flush()
        finally:
            terminal.stop()


def quick_start() -> list[str]:
    """Return the shell blocks of the quick start."""
    page = ROOT / "docs" / "start" / "quickstart.md"
    return [text for language, text in blocks(page) if language == "bash"]


if __name__ == "__main__":
    main()
