"""Refuses every address that is not this machine's; Python imports it at the start of a process.

`tests/conftest.py` puts this folder on the path of the suite's processes and of what they start.
What was tried is written to the file that `NETWORK_TRIED` names, so that a caller that swallows the
error is found too. Names are refused as well: a look-up leaves the machine. A UDP socket may be
"connected", which sends nothing: Ray asks the kernel for the machine's address so.
"""

import gc
import os
import socket
import sys

TRIED = "NETWORK_TRIED"
EXPECTED = (
    "169.254.169.254", "metadata.google.internal",  # Ray's head asks which cloud it is in,
    "api.forge.coreweave.com",  # and so does vLLM; no setting stops either
    "huggingface.co",  # where a test names a model that only the hub could have
)  # fmt: skip
"""Refused as all others are, but no fault of the suite."""
RESERVED = (".invalid", ".test", ".example")
"""Names that nobody has (RFC 2606), which tests may look up in vain."""


def is_own(host: str) -> bool:
    """Whether an address is of this machine: only those can be bound to."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host.partition("%")[0], 0))
        except OSError:
            return False
    return True


def is_numeric(host: str) -> bool:
    """Whether it is an address rather than a name; 127.1 and 0x7f000001 are addresses too."""
    try:
        if ":" in host:
            socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
        else:
            socket.inet_aton(host)
    except (OSError, UnicodeEncodeError):
        return False
    return True


def refuse(what: str, host: str) -> None:
    """Keep what was tried, and fail."""
    if host in EXPECTED:
        raise ConnectionRefusedError(f"the suite uses no network: {what}")
    with open(os.environ[TRIED], "a", encoding="utf-8") as file:
        test = os.environ.get("PYTEST_CURRENT_TEST", "no test")
        file.write(f"{what} by {' '.join(sys.argv[:3])} in {test}\n")
    raise ConnectionRefusedError(f"the suite uses no network: {what}")


def guard(event: str, arguments: tuple) -> None:
    """Refuse connections to other machines, as an audit hook."""
    if event == "socket.connect":
        sock, address = arguments
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
            host = address[0]
            if is_numeric(host) and not is_own(host):
                refuse(f"connect to {host}:{address[1]}", host)
    elif event == "socket.getaddrinfo":
        host = arguments[0].decode() if isinstance(arguments[0], bytes) else arguments[0]
        if not host or host.lower() in ("localhost", socket.gethostname()) or is_numeric(host):
            return
        if host.endswith(RESERVED):
            raise socket.gaierror(socket.EAI_NONAME, f"{host} is nobody's name")
        refuse(f"look-up of {host}", host)


if TRIED in os.environ:
    sys.addaudithook(guard)
    # What a process imports stays. Python, by default, would look for garbage in it so often that
    # torch and vLLM take 8.4 s of CPU to import; so it is 7.2 s.
    gc.set_threshold(100_000, 50, 100)
