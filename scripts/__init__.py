"""Command-line programs around the library: installer, demo and its report, data, Slurm."""
