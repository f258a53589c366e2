"""`search-r1 credit`: the worth of each found document to the answer; docs/guides/watching.md."""
