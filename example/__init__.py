"""The example: a small corpus of real geographic facts, questions about it, and a policy."""

import verl as verl  # before torch: it sets how idle threads wait
