"""The example: a small corpus of real geographic facts, questions about it, and a policy."""
