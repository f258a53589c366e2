"""Whether this process may run code from a model's folder, which requires `trust_remote_code`."""

import os

TRUST = "SEARCH_R1_TRUST_REMOTE_CODE"
"""Environment variable that passes the setting on to child processes."""


def set_trust(is_trusted: bool) -> None:
    """Set `trust_remote_code` for this process and its children."""
    os.environ[TRUST] = "1" if is_trusted else "0"


def trusts_remote_code() -> bool:
    """Return the value of `trust_remote_code`; false if it was not set."""
    return os.environ.get(TRUST) == "1"
