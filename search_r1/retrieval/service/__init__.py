"""The HTTP server for any backend: batches, caches, limits, errors, metrics, search page."""
