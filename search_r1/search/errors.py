"""Every exception the retrieval service and its client raise on purpose, a branch of `verl.errors`.

SearchError
├── RetrieverUnavailable   no answer: connection, timeout, 429 or 5xx, after all retries
├── RetrieverRefused       a 4xx, or an answer outside the wire contract: retrying is useless
├── Overloaded             the queue is full: ask again after `retry_after` seconds
├── DeadlineExceeded       the time that the request allowed was over before its turn
├── UpstreamUnavailable    an online service failed or limits the rate, after all retries
│   └── UpstreamInvalid    it answers, but never in its documented form
├── UpstreamRefused        an online service refused for good: a wrong key, a spent quota
├── QueryNotRecorded       a replay has no record of this query
├── CorpusError            a corpus that is missing or has a malformed row
├── IndexMismatch          an index that was not built from this corpus or encoder
└── SetupError             something to load is not there: package, GPU, model, index
"""

from pathlib import Path

from verl.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
"""The checkout, or the folder of an installed copy."""


class SearchError(UserError):
    """Base of all errors of the retrieval service."""


class RetrieverUnavailable(SearchError):
    """The server did not answer within the allowed retries; an infrastructure failure."""

    def __init__(self, message: str, num_retries: int = 0, reason: str = "") -> None:
        """`num_retries`: further attempts made, in vain; `reason`: the message without advice."""
        super().__init__(message)
        self.num_retries = num_retries
        self.reason = reason or message


class RetrieverRefused(SearchError):
    """The server understood and refused, or answered something outside the contract."""

    def __init__(self, message: str, status: int | None = None) -> None:
        """`status`: of the HTTP answer; None for an answer outside the contract."""
        super().__init__(message)
        self.status = status


class Overloaded(SearchError):
    """The server's queue is full."""

    def __init__(self, message: str, retry_after: float) -> None:
        """`retry_after`: seconds after which there is likely room."""
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(SearchError):
    """The request's time was over before it could be searched."""


class UpstreamUnavailable(SearchError):
    """An online search service did not answer within the allowed retries."""


class UpstreamInvalid(UpstreamUnavailable):
    """An online search service answered something outside its documented form, each time."""


class UpstreamRefused(SearchError):
    """An online search service refused for good; its message says why."""


class QueryNotRecorded(SearchError):
    """The record that is replayed does not hold this query."""


class CorpusError(SearchError):
    """The corpus cannot be read as jsonl documents."""


class IndexMismatch(SearchError):
    """The index does not belong to the corpus or the encoder it was opened with."""


class SetupError(SearchError):
    """A package, device, model or index that the settings ask for is missing."""


def install_command(extra: str) -> str:
    """The command that installs an extra of pyproject.toml; the project is on no registry."""
    if (ROOT / "pyproject.toml").is_file():
        return f"pip install -e '{ROOT}[{extra}]'"
    return f"pip install '.[{extra}]' in a checkout of Search-R1"
