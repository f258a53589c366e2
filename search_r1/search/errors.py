"""Every exception the retrieval service and its client raise on purpose.

SearchError
├── RetrieverUnavailable   no answer: connection, timeout, 429 or 5xx, after all retries
├── RetrieverRefused       a 4xx, or an answer outside the wire contract: retrying is useless
├── CorpusError            a corpus that is missing or has a malformed row
├── IndexMismatch          an index that was not built from this corpus or encoder
└── SetupError             something to load is not there: package, GPU, model, index
"""


class SearchError(Exception):
    """Base of all errors of the retrieval service."""


class RetrieverUnavailable(SearchError):
    """The server did not answer within the allowed retries; an infrastructure failure."""


class RetrieverRefused(SearchError):
    """The server understood and refused, or answered something outside the contract."""


class CorpusError(SearchError):
    """The corpus cannot be read as jsonl documents."""


class IndexMismatch(SearchError):
    """The index does not belong to the corpus or the encoder it was opened with."""


class SetupError(SearchError):
    """A package, device, model or index that the settings ask for is missing."""
