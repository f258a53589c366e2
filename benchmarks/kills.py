"""The old name of the proof in tests/proofs/kills: `python -m benchmarks.kills`."""

import sys

from tests.proofs.kills.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
