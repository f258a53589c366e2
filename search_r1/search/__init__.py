"""Commands under the original Search-R1's names; the code is in `search_r1.retrieval`."""
