"""Google search under the original Search-R1's name and flags; see docs/start/migration.md."""

import argparse
import os
import sys
from pathlib import Path

if not __package__:  # run as a file: the project may not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from search_r1.retrieval import command


def main(argv: list[str] | None = None) -> int:
    epilog = "all other flags: python -m search_r1.search.retrieval_server --help"
    parser = argparse.ArgumentParser("google_search_server", description=__doc__, epilog=epilog)
    parser.add_argument("--api_key", help="sets GOOGLE_API_KEY")
    parser.add_argument("--cse_id", help="sets GOOGLE_CSE_ID")
    parser.add_argument("--snippet_only", action="store_true", help="do not fetch the pages")
    args, others = parser.parse_known_args(argv)
    keys = {"GOOGLE_API_KEY": args.api_key, "GOOGLE_CSE_ID": args.cse_id}
    os.environ.update({name: key for name, key in keys.items() if key})
    pages = [] if args.snippet_only else ["--page_text"]
    return command.main(["--retriever_name", "google", *pages, *others])


if __name__ == "__main__":
    sys.exit(main())
