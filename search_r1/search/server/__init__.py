"""The HTTP server over any backend: batches, caches, limits, errors, metrics, the page."""
