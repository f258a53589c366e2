"""Natural Questions with documents in the prompt: train.parquet and test.parquet."""

import sys
from pathlib import Path

if not __package__:  # started as a file: the checkout may not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from search_r1.datasets.command import Script
from search_r1.datasets.wording import Style

SCRIPT = Script(
    name="nq_rag",
    about="Build Natural Questions with found documents in the prompt: the RAG baseline.",
    local_dir="data/nq_rag",
    style=Style.RAG,
)

if __name__ == "__main__":
    sys.exit(SCRIPT.run())
