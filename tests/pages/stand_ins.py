"""What stands in where a page's command wants a GPU, hours, a cluster or the hub.

Everything that has no row here is what a reader runs: scripts, downloads (from a hub of this
machine), builders, retrieval servers, checks of options and data, evaluation, questions.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

STAND_INS = {
    "make": "a look for its target; of `make demo` the model is left where it would be",
    "main_ppo": "one dialogue with the run's tools and reward, from its options and rows; a tiny "
    "random model is what it leaves (trainer.py)",
    "example.model": "that tiny model, instead of half a minute of conversion",
    "Qwen/Qwen2.5-3B": "that tiny model, where a command loads it itself",
    "verl.checkpoint": "its own refusal: there is no checkpoint to export",
    "evaluate, infer, serve": "transformers on the CPU, one row; the port of the test",
    "sbatch": "a program that says that the job was submitted",
}
"""Command -> what is run in its place."""

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
    """A checkout of `root` in `folder`, without what was built or fetched, with the stand-ins."""
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
