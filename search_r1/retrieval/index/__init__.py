"""Resumable builds of BM25 and FAISS indexes from a corpus."""
