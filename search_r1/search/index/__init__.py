"""How an index is built: resumable embeddings and tokens, FAISS and BM25, and their folder."""
