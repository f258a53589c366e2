"""Asking the agent: a model, an engine and a retriever opened from options, and one dialogue."""
