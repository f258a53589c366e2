"""`search-r1 view`: a page that shows runs; docs/guides/watching.md."""
