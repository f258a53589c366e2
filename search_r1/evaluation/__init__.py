"""Evaluation: runs the agent or a baseline on every row, scores the answers, compares results."""
