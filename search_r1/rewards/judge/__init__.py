"""The reward `llm_judge`, which asks a language model whether an answer is right."""
