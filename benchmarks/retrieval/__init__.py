"""Measures the retrieval server, in comparison with a server written like the original's."""
