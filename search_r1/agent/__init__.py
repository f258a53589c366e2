"""The search agent: the wording and grammar of its dialogue, and the loop that runs it."""
