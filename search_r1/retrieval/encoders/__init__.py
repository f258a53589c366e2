"""Neural text encoders and rerankers; `search_r1.retrieval.encoder` opens the encoders."""
