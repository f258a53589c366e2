"""The example's files, which the wheel brings: links to `example/` in the repository."""
