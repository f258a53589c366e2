"""Commands that are not settled yet: deleting this folder leaves everything else as it is."""
