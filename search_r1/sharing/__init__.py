"""Trained models for others: a folder with weights, settings and a model card, and its upload."""
