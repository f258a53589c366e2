"""The checks of `scripts.gpu_smoke`: what only a card can show, each in a process of its own."""
