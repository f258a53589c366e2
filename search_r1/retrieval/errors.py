"""The exceptions of the retrieval service and its client, a branch of the tree in `verl.errors`."""

from pathlib import Path

from verl.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
"""The root of the checkout, or the folder of installed packages."""


REQUEST_LEVEL_STATUSES = frozenset({301, 302, 303, 307, 308, 401, 402, 403, 404, 405, 421})
"""Statuses that refuse a request as a whole, which no single query can have caused."""


class SearchError(UserError):
    """Base class of all errors of the retrieval service."""


class RetrieverUnavailable(SearchError):
    """No server responded within the allowed retries: no connection, a timeout, 429 or 5xx."""

    def __init__(self, message: str, num_retries: int = 0, reason: str = "") -> None:
        """`num_retries`: failed attempts after the first; `reason`: the message without advice."""
        super().__init__(message)
        self.num_retries = num_retries
        self.reason = reason or message


class RetrieverRefused(SearchError):
    """A 4xx, or a response outside the wire contract; a retry is useless."""

    def __init__(self, message: str, status: int | None = None) -> None:
        """`status`: the HTTP status; None for a response outside the wire contract."""
        super().__init__(message)
        self.status = status


class Overloaded(SearchError):
    """The server's queue is full, or it is stopping."""

    def __init__(self, message: str, retry_after: float) -> None:
        """`retry_after`: seconds after which the queue probably has free slots."""
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(SearchError):
    """The request's time was over before it was answered."""


class UpstreamUnavailable(SearchError):
    """An online search service failed, or limited the rate, in all allowed retries."""


class UpstreamInvalid(UpstreamUnavailable):
    """Every response of an online search service was outside its documented format."""


class UpstreamRefused(SearchError):
    """An online search service refused permanently: a wrong key, an exhausted quota."""


class QueryNotRecorded(SearchError):
    """The replayed record does not contain this query."""


class CorpusError(SearchError):
    """The corpus is missing or has a malformed row."""


class IndexMismatch(SearchError):
    """The index is damaged, or does not match the corpus or encoder it was opened with."""


class SetupError(SearchError):
    """A package, device, model or index that the settings ask for is missing."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra; the project is not on a package index."""
    if (ROOT / "pyproject.toml").is_file():
        return f"pip install -e '{ROOT}[{extra}]'"
    return f"pip install '.[{extra}]' in a checkout of Search-R1"
