"""`python -m verl.trainer.sft`: `verl.ext.sft.trainer` by the path that users know."""

from __future__ import annotations

import sys

from verl.ext.sft.trainer import main
from verl.malloc import rerun_with_malloc

if __name__ == "__main__":
    rerun_with_malloc("verl.trainer.sft")
    sys.exit(main())
