"""Compares the step-time model of `search-r1 plan` with measured steps (evidence/step_time.md)."""
