"""Agents that are loops of others: they ask an OpenAI-compatible gateway for the policy's turns."""
