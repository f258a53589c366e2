"""The retrieval server, its engines and its client."""
