"""The retrieval server under the original Search-R1's name; see docs/start/migration.md."""

import sys
from pathlib import Path

if not __package__:  # run as a file: the project may not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from search_r1.retrieval.command import main

if __name__ == "__main__":
    sys.exit(main())
