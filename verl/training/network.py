"""Which network interface the processes of a run reach each other through."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import psutil

from verl.errors import redact

NETWORK = ("NCCL_", "GLOO_", "TORCH_NCCL_")
"""Beginnings of the variables of the driver that ranks and engines on all nodes get too."""
HUB = frozenset(
    f"HF_{name}"
    for name in (
        "HOME", "ENDPOINT", "HUB_CACHE", "ASSETS_CACHE", "XET_CACHE", "DATASETS_CACHE",
        "MODULES_CACHE", "TOKEN_PATH", "STORED_TOKENS_PATH", "HUB_OFFLINE", "DATASETS_OFFLINE",
        "HUB_ETAG_TIMEOUT", "HUB_DOWNLOAD_TIMEOUT", "HUB_DISABLE_XET", "HUB_DISABLE_PROGRESS_BARS",
        "HUB_DISABLE_TELEMETRY", "HUB_DISABLE_IMPLICIT_TOKEN", "HUB_DISABLE_SYMLINKS_WARNING",
        "HUB_VERBOSITY", "XET_HIGH_PERFORMANCE", "DEBUG",
    )
)  # fmt: skip
"""The hub's variables that they get; each by its name, for Ray logs what it forwards."""
PRIVATE = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT")
"""Those that they get by a call of the actor: what travels so is in no log."""


def forwarded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables about networks and the hub, which mean the same on every node."""
    named = {k: v for k, v in environment.items() if k.startswith(NETWORK) or k in HUB}
    return {name: value for name, value in named.items() if redact(value) == value}


def secret_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Secrets of the hub, which no runtime environment may hold."""
    return {name: environment[name] for name in PRIVATE if name in environment}


def address_towards(host: str) -> str:
    """The address of this machine that packets to `host` leave from."""
    family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # of a datagram socket: chooses a route, sends nothing
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The interface that has `address`, or None."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in entries):
            return name
    return None


def interface_variables(master: str) -> dict[str, str]:
    """Variables that have gloo and NCCL talk through the interface that leads to `master`: gloo
    would take the address of the host's name, often 127.0.0.1, where no other node reaches it."""
    name = interface_of(address_towards(master))
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
