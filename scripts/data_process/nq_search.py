"""Natural Questions with prompts that search: train.parquet and test.parquet."""

import sys
from pathlib import Path

if not __package__:  # started as a file: the checkout may not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from search_r1.datasets.command import Script

SCRIPT = Script(
    name="nq_search",
    about="Build Natural Questions for an agent that searches.",
    local_dir="data/nq_search",
)

if __name__ == "__main__":
    sys.exit(SCRIPT.run())
