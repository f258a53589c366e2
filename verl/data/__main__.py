"""`python -m verl.data validate FILE...`; see `verl.data.validation`."""

import sys

from verl.data.validation import main

if __name__ == "__main__":
    sys.exit(main())
