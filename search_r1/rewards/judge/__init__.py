"""The reward that asks a language model whether an answer is right."""
