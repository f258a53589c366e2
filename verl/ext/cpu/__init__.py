"""What makes training fast on processors, and is never executed by a run on GPUs."""
