"""HotpotQA questions with a corpus of their own: `search-r1 data small_hotpotqa` (docs/data.md)."""

import sys
from pathlib import Path

if not __package__:  # started as a file: the checkout may not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from search_r1.datasets.command import build

NAME = "small_hotpotqa"

if __name__ == "__main__":
    sys.exit(build(NAME))
