"""Encoders of text by neural models; `search_r1.search.encoder` opens them."""
