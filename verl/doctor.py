"""`python -m verl.doctor`: `verl.ext.doctor` by the path that users know."""

from __future__ import annotations

import sys

from verl.ext.doctor import main

if __name__ == "__main__":
    sys.exit(main())
