"""`python -m verl.trainer.sft`: `verl.ext.sft.trainer` by the path that users know."""

from __future__ import annotations

import sys

from verl.ext.sft.trainer import main

if __name__ == "__main__":
    sys.exit(main())
