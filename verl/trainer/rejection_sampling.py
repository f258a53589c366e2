"""`python -m verl.trainer.rejection_sampling`: the one of `verl.ext.sft`, by a path users know."""

from __future__ import annotations

import sys

from verl.ext.sft.rejection_sampling import main

if __name__ == "__main__":
    sys.exit(main())
