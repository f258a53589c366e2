"""Neural text encoders and rerankers; `search_r1.search.encoder` opens the encoders."""
