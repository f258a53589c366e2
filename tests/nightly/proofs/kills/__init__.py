"""Kill a training run again and again, and compare it with an undisturbed one."""
