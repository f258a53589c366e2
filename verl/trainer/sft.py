"""`python -m verl.trainer.sft`: the former path of `verl.sft.trainer`."""

from __future__ import annotations

import sys

from verl.sft.trainer import main

if __name__ == "__main__":
    sys.exit(main())
