"""Measurements of the retrieval service against a server written as the original is."""
