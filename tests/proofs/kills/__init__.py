"""Kill a training run again and again, and hold it against one that was left alone."""
