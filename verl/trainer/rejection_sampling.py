"""`python -m verl.trainer.rejection_sampling`: the former path of `verl.sft.rejection_sampling`."""

from __future__ import annotations

import sys

from verl.sft.rejection_sampling import main

if __name__ == "__main__":
    sys.exit(main())
