"""A run on real questions: SmolLM2-135M-Instruct learns to search Wikipedia passages."""
