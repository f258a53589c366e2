"""Whether this process may run code that lies in a model's folder: not unless an option said so."""

from __future__ import annotations

import os

TRUST = "SEARCH_R1_TRUST_REMOTE_CODE"
"""Variable by which the processes that this one starts know it too."""


def set_trust(is_trusted: bool) -> None:
    """Say what `trust_remote_code` is, for this process and those that it starts."""
    os.environ[TRUST] = "1" if is_trusted else "0"


def trusts_remote_code() -> bool:
    """What it is; false where nobody said."""
    return os.environ.get(TRUST) == "1"
