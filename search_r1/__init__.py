"""Search agents: the dialogue loop, its rewards, and the retriever."""
