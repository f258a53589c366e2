"""The checks of `scripts.gpu_smoke`, for what only a GPU can show; each runs in its own process."""
