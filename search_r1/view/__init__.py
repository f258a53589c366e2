"""`search-r1 view`: a page that shows runs; docs/view.md."""
