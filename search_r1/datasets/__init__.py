"""Builds the question files for training and validation from published or the user's own sets.

The scripts of `scripts/data_process/` are thin command lines around this package.
"""
