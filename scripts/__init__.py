"""Command-line programs around the library: the installer, the demo and its report."""
