"""Scripts that build question files and a corpus (docs/data.md)."""
