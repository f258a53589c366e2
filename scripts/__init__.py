"""Command-line programs around the library: installer, demo and its report, data, Slurm."""

import verl as verl  # before torch: it sets how idle threads wait
