"""Compares our speed with other trainers on the same work, each in its own process."""
