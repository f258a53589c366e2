"""The original Search-R1's start of SerpAPI search; it calls our server: docs/migration.md."""

import argparse
import os
import sys
from pathlib import Path

if not __package__:  # started as a file: the checkout may not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from search_r1.search import retrieval_server


def main(argv: list[str] | None = None) -> int:
    """Command-line entry; returns the exit status."""
    parser = argparse.ArgumentParser(prog="serp_search_server", description=__doc__)
    parser.add_argument("--search_url", help="as --online_url")
    parser.add_argument("--serp_api_key", help="sets SERPAPI_API_KEY")
    parser.add_argument("--serp_engine", choices=["google"], help="which engine SerpAPI asks")
    given, others = parser.parse_known_args(argv)
    if given.serp_api_key:
        os.environ["SERPAPI_API_KEY"] = given.serp_api_key
    url = ["--online_url", given.search_url] if given.search_url else []
    return retrieval_server.main(["--retriever_name", "serpapi", *url, *others])


if __name__ == "__main__":
    sys.exit(main())
