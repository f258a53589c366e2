"""Optional features, one file or folder each: deleting one leaves the rest working."""
