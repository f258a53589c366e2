"""`python -m benchmarks.kills`: the proof in tests/proofs/kills, under its old name."""

import sys

from tests.proofs.kills.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
