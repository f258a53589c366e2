"""A reader's walk from the original's quick start to a trained example here, with times.

`python -m tests.pages.walk original --out DIR` types the original's quick start as its README has
it, then what docs/migration.md gives instead; the hub is one of this machine with small files.
`python -m tests.pages.walk here --out DIR` types docs/quickstart.md with the real model, trainer
and engine; only the installation is taken as done, and of the training so many steps. Both print
rows of a table: command, seconds, exit status and the last line that was said.
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
from tests.pages.stand_ins import lay_out
from tests.pages.terminal import Terminal, blocks
from tests.pages.test_reading import published

ROOT = Path(__file__).resolve().parents[2]
STEPS = 2
"""Of the quick start's 20."""
ORIGINAL = """
python scripts/download.py --save_path data/wiki-18
cat data/wiki-18/part_* > data/wiki-18/e5_Flat.index
gzip -d data/wiki-18/wiki-18.jsonl.gz
python scripts/data_process/nq_search.py
bash retrieval_launch.sh &
bash train_ppo.sh
python infer.py
"""
INSTEAD = """
RETRIEVER_NAME=e5 RETRIEVER_MODEL=intfloat/e5-base-v2 CORPUS_PATH=data/wiki-18/wiki-18.jsonl \\
  INDEX_PATH=data/wiki-18/e5_Flat.index bash retrieval_launch.sh &
until curl -sf http://127.0.0.1:8000/health; do sleep 1; done
bash train_ppo.sh --cfg job
python infer.py "what is nq train 3?" --model models/none
"""


def commands(block: str) -> list[str]:
    """The commands of a block, each with the lines that it goes on in."""
    found = re.split(r"(?<!\\)\n", block.strip())
    return [one for one in found if one and not one.startswith("#")]


def walk(terminal: Terminal, typed: Sequence[str]) -> Iterator[str]:
    """Type the commands; a row of the table for each."""
    for command in typed:
        start = time.perf_counter()
        status, said = terminal.run(command.replace("TOTAL_STEPS=20", f"TOTAL_STEPS={STEPS}"))
        seconds = time.perf_counter() - start
        with (terminal.checkout.parent / "said.txt").open("a") as file:
            file.write(f"$ {command}\n{said}\n")
        own = "\n".join(line for line in said.strip().splitlines() if " INFO serving " not in line)
        shown = re.sub(r"\s*\\\n\s*", " ", command).replace("|", r"\|")
        last = re.sub(r"\s+", " ", own.rpartition("\n")[2]).replace("|", r"\|")
        yield f"| `{shown}` | {seconds:.1f} s | {status} | {last[:300]} |"


def main() -> None:
    """Lay out a checkout where there is none, and walk."""
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
            pages = {"original": [ORIGINAL, INSTEAD], "here": quick_start()}
            for block in pages[options.part]:
                for row in walk(terminal, commands(block)):
                    sys.stdout.write(row + "\n")
                    sys.stdout.flush()
        finally:
            terminal.end()


def quick_start() -> list[str]:
    """The blocks of the page that are typed."""
    page = ROOT / "docs" / "quickstart.md"
    return [text for language, text in blocks(page) if language == "bash"]


if __name__ == "__main__":
    main()
