"""Compares all algorithms on the example with the same budget and the real trainer, in a table."""
