"""What other trainers take for the same work, each in a process and an environment of its own."""
