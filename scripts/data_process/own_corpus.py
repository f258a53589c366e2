"""Folders and files of texts as a corpus: `search-r1 data own_corpus` (docs/guides/data.md)."""

import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout may not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from search_r1.datasets.command import build

if __name__ == "__main__":
    sys.exit(build("own_corpus"))
