"""Measures the figures that docs/ states: retrieval, algorithms, memory, speed, asynchrony."""
