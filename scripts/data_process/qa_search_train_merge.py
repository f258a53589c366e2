"""Training questions of several sets in one train.parquet."""

import sys
from pathlib import Path

if not __package__:  # started as a file: the checkout may not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from search_r1.datasets.command import Script

SCRIPT = Script(
    name="qa_search_train_merge",
    about="Merge the training questions of several sets for an agent that searches.",
    local_dir="data/nq_search",
    roles=("train",),
    has_sources=True,
)

if __name__ == "__main__":
    sys.exit(SCRIPT.run())
