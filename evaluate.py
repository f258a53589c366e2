"""`python evaluate.py …`: `search-r1 evaluate` from a checkout (docs/guides/evaluation.md)."""

import sys

from search_r1.cli import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
