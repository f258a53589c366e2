"""The HTTP service over any engine: merging, caching, admission, statuses, metrics."""
