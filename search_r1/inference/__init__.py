"""Inference: starts a model, an engine and a retriever client from options and runs dialogues."""
