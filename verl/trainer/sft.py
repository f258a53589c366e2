"""`python -m verl.trainer.sft`: alias of `verl.sft.trainer`, which was here before."""

from __future__ import annotations

import sys

from verl.sft.trainer import main

if __name__ == "__main__":
    sys.exit(main())
