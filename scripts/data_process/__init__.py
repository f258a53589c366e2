"""Scripts that build question files and a corpus (docs/guides/data.md)."""
