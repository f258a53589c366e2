"""Corpora from folders and files of texts: readers of each format, cutting, and the writer."""
