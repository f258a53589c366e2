"""Agents: the loop of a dialogue, its format, and the tools that a policy may call."""
