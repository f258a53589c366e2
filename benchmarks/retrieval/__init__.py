"""The retrieval service measured against a server written as the original is."""
