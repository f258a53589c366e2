"""The interface between trainer and rewards, and rewards in stages."""
