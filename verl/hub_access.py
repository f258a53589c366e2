"""Whether the hub answers, asked before its library would try for half a minute."""

import logging
import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants

TIMEOUT_S = 1.8
"""Seconds to wait for a connection."""


def hub_address() -> str:
    """Return the address of the hub; the library reads HF_ENDPOINT only when it is imported."""
    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def hub_problem() -> str:
    """Return why the hub does not answer; '' if it may, or if it is not asked (offline, proxy).

    The library shows its messages itself and passes them to our log; from here on, only the latter.
    """
    logging.getLogger("huggingface_hub").handlers.clear()
    if constants.HF_HUB_OFFLINE or getproxies():
        return ""
    try:
        hub = urlsplit(hub_address())
        port = hub.port or {"http": 80, "https": 443}[hub.scheme]
    except (ValueError, KeyError):
        return ""  # which the library reports
    if not hub.hostname:
        return ""
    try:
        socket.create_connection((hub.hostname, port), TIMEOUT_S).close()
    except OSError as error:
        return f"{hub.hostname} does not answer ({error})"
    return ""
