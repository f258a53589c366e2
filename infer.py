"""`python infer.py "question"`: the command `search-r1 infer` from a checkout (docs/asking.md)."""

import sys

from search_r1.infer import main

if __name__ == "__main__":
    sys.exit(main())
