"""`python infer.py "question"`: `search-r1 infer` from a checkout (docs/guides/inference.md)."""

import sys

from search_r1.infer import main

if __name__ == "__main__":
    sys.exit(main())
