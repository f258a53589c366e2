"""Environments of other standards as agents of a run, and the search task as one of theirs."""
