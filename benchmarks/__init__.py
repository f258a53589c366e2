"""Measures the figures that docs/ states: retrieval, algorithms, memory, speed, asynchrony."""

import verl as verl  # before torch: it sets how idle threads wait
