"""Every figure that docs/ gives, measured: retrieval, algorithms, memory, checkpoints, kills."""
