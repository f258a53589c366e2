"""Engines beside vLLM: transformers on this machine, and OpenAI-compatible servers."""
