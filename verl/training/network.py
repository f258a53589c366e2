"""Network interfaces and environment variables that the processes of a run share."""

import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any

import psutil

from verl.errors import redact

NETWORK = ("NCCL_", "GLOO_", "TORCH_NCCL_")
"""Prefixes of variables that the driver forwards to the ranks and engines on all nodes."""
HUB = frozenset(f"HF_{name}" for name in (
    "HOME", "ENDPOINT", "HUB_CACHE", "ASSETS_CACHE", "XET_CACHE", "DATASETS_CACHE",
    "MODULES_CACHE", "TOKEN_PATH", "STORED_TOKENS_PATH", "HUB_OFFLINE", "DATASETS_OFFLINE",
    "HUB_ETAG_TIMEOUT", "HUB_DOWNLOAD_TIMEOUT", "HUB_DISABLE_XET", "HUB_DISABLE_PROGRESS_BARS",
    "HUB_DISABLE_TELEMETRY", "HUB_DISABLE_IMPLICIT_TOKEN", "HUB_DISABLE_SYMLINKS_WARNING",
    "HUB_VERBOSITY", "XET_HIGH_PERFORMANCE", "DEBUG",
))  # fmt: skip
"""Hugging Face variables that are forwarded, listed by name because Ray logs what it forwards."""
PRIVATE = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT")
"""Variables that are passed by `share_secrets` instead."""


def forwarded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the network and hub variables to forward, without those that contain secrets."""
    named = {k: v for k, v in environment.items() if k.startswith(NETWORK) or k in HUB}
    return {name: value for name, value in named.items() if redact(value) == value}


def secret_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the hub's secrets, which must not be in a Ray runtime environment."""
    return {name: environment[name] for name in PRIVATE if name in environment}


def share_secrets(hosts: Iterable[Any]) -> None:
    """Set this process's secrets in those of actors (`ActorHost`), by a call that is not logged."""
    if secrets := secret_variables(os.environ):
        for host in hosts:
            host.run.remote(set_environment, secrets)


def set_environment(variables: Mapping[str, str]) -> None:
    """Set environment variables of this process."""
    os.environ |= variables


def address_towards(host: str) -> str:
    """Return this machine's address on the route to `host`."""
    family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # a datagram socket only chooses a route; nothing is sent
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has `address`, or None."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in entries):
            return name
    return None


def joins_cluster() -> bool:
    """Whether this process's run joins a running Ray cluster, where other machines compute."""
    return bool(os.environ.get("RAY_ADDRESS"))


def choose_interface(master: str) -> None:
    """Have this process communicate through the interface that leads to `master`."""
    os.environ |= {**interface_variables(master), **os.environ}  # the user's prevail


def interface_variables(master: str) -> dict[str, str]:
    """Return variables that make gloo and NCCL use the interface that leads to `master`."""
    # By default gloo uses the address of the host's name, which may be 127.0.0.1 on every node.
    name = interface_of(address_towards(master))
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
