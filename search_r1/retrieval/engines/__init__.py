"""Retriever backends behind one protocol; `registry` builds the one that the settings name."""
