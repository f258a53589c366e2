"""`search-r1 download` as a script, as in the original Search-R1 (docs/guides/retrieval.md)."""

import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout may not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from search_r1.datasets.download import main

if __name__ == "__main__":
    sys.exit(main())
