"""SerpAPI search under the original Search-R1's name and flags; see docs/start/migration.md."""

import argparse
import os
import sys
from pathlib import Path

if not __package__:  # run as a file: the project may not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from search_r1.retrieval import command


def main(argv: list[str] | None = None) -> int:
    epilog = "all other flags: python -m search_r1.search.retrieval_server --help"
    parser = argparse.ArgumentParser("serp_search_server", description=__doc__, epilog=epilog)
    parser.add_argument("--search_url", help="same as --online_url")
    parser.add_argument("--serp_api_key", help="sets SERPAPI_API_KEY")
    parser.add_argument("--serp_engine", choices=["google"], help="engine that SerpAPI queries")
    args, others = parser.parse_known_args(argv)
    if args.serp_api_key:
        os.environ["SERPAPI_API_KEY"] = args.serp_api_key
    url = ["--online_url", args.search_url] if args.search_url else []
    return command.main(["--retriever_name", "serpapi", *url, *others])


if __name__ == "__main__":
    sys.exit(main())
