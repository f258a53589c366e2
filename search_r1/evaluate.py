"""`python -m search_r1.evaluate`: the command `search-r1 evaluate`.

Do not import this module: it would hide the package's function `search_r1.evaluate`.
"""

import sys

from search_r1.evaluation.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
