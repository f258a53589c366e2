"""Supervised fine-tuning: demonstrations, and the trainer that learns from them."""
