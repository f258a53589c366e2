"""A short training API, compatible with another Search-R1, on top of `search_r1.Trainer`.

The wheel installs it as the top-level package `searchr1`. See docs/reference/python.md.
"""

import verl as verl  # before torch: it sets how idle threads wait
