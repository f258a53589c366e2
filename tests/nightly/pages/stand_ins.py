"""Stand-ins for the commands of a page that need a GPU, hours, a cluster or the real hub.

All other commands run as they do for a reader: scripts, downloads (from a local hub), builders,
retrieval servers, checks of options and data, evaluation, questions.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

STAND_INS = {
    "make": "a check that the target exists; `make demo` also copies a tiny random model to the "
    "folder of its result",
    "main_ppo": "one dialogue with the tools, reward, options and rows of the run; the result is "
    "the tiny model (trainer.py)",
    "example.model": "a copy of the tiny model, instead of half a minute of conversion",
    "Qwen/Qwen2.5-3B": "the tiny model, if a command loads the model itself",
    "verl.checkpoint": "the command, which must refuse: there is no checkpoint to export",
    "evaluate, infer, serve": "the command with transformers on the CPU, one row, the test's port",
    "sbatch": "a program that prints that the job was submitted",
}
"""What is run instead, by command."""

PYTHON = """#!/bin/bash
args=("$@")
case "$*" in
*"-m example.model"*) exec cp -r "$STAND_IN_MODEL" models/SmolLM2-135M-Instruct ;;
*"-m verl.checkpoint"*) {python} "$@"; exit $(($? == 2 ? 0 : 1)) ;;
*"-m search_r1.evaluate"*)
  args+=(--engine transformers --num-rows 1 --device cpu)
  args+=(--retriever-url "${{RETRIEVER_URL%/retrieve}}") ;;
*"-m search_r1.serve"*)
  args+=(--engine transformers --device cpu --port 0 --retriever-url "$RETRIEVER_URL") ;;
*infer.py*) args+=(--engine transformers --device cpu --retriever-url "$RETRIEVER_URL") ;;
esac
exec {python} "${{args[@]/#Qwen\\/Qwen2.5-3B/$STAND_IN_MODEL}}"
"""
MAKE = """#!/bin/bash
grep "^$1:" {root}/Makefile || exit
[[ $* != demo ]] || {{ mkdir -p runs/demo && cp -r "$STAND_IN_MODEL" runs/demo/model; }}
"""
SBATCH = "#!/bin/bash\necho Submitted batch job 1\n"


def lay_out(root: Path, folder: Path) -> None:
    """Create a fresh checkout of `root` in `folder`, with the stand-ins on its path."""
    shutil.copytree(
        root / "example", folder / "example", ignore=shutil.ignore_patterns("index", "adapter")
    )
    for name in ("verl", "search_r1", "scripts", "tests", "infer.py", "Makefile",
                 "retrieval_launch.sh", "train_grpo.sh", "train_ppo.sh"):  # fmt: skip
        (folder / name).symlink_to(root / name)
    (folder / "models").mkdir()
    binaries = folder / ".venv" / "bin"
    binaries.mkdir(parents=True)
    programs = {
        "python": PYTHON.format(python=sys.executable),
        "search-r1": f'#!/bin/bash\nexec {sys.executable} -m search_r1.cli "$@"\n',
        "make": MAKE.format(root=root),
        "sbatch": SBATCH,
    }
    for name, text in programs.items():
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    (binaries / "activate").write_text(f"export PATH={binaries}:$PATH\n")
