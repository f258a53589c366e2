"""The agent behind `/v1/chat/completions`: `python -m search_r1.serve`; see docs/asking.md."""

import sys

from search_r1.agent_server.running import main

if __name__ == "__main__":
    sys.exit(main())
