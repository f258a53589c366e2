"""The training loop and its command lines."""
