"""The old name of the proof in tests/nightly/proofs/kills: `python -m benchmarks.kills`."""

import sys

from tests.nightly.proofs.kills.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
