"""Names what took the place of the original Search-R1's program of this name."""

import sys

if __name__ == "__main__":
    sys.exit(
        "retrieval: this module is not a program; expected one of:\n"
        "  python -m search_r1.search.retrieval_server --help   (a server of documents)\n"
        "  python scripts/data_process/nq_rag.py --help         (documents in prompts)"
    )
