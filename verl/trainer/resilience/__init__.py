"""What keeps a run alive: saving, stopping and resuming it, and living through what is lost."""
