"""vLLM servers that the user started (`rollout.url`), as engines: the engine, and its checks."""
