"""The retrieval server, its backends and its client."""
