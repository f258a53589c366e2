"""The example world: a small corpus of real geographic facts, questions about it, a policy."""
