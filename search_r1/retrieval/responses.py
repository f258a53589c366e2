"""Reads the responses of retrieval servers: their statuses, and documents in any usual form."""

import json
import re
from typing import Any

import httpx
import orjson

from search_r1.retrieval.errors import RetrieverRefused
from search_r1.retrieval.schema import Document, from_wire
from search_r1.retrying import TransientError, parse_retry_after
from verl.errors import redact

FIX_TOKEN = "export RETRIEVER_TOKEN with the server's token"
FIX_ADDRESS = "give the address of a retrieval server, http://HOST:PORT/retrieve"
FIXES = {
    400: "give the server the url's host name with its --allowed_hosts",
    401: FIX_TOKEN,
    403: FIX_TOKEN,
    404: FIX_ADDRESS,
    405: FIX_ADDRESS,
    422: "ask for no more than the server allows (retriever.topk; the server's --max_topk)",
}
"""Advice in the error message for a refused request, by HTTP status."""


class InvalidResponse(TransientError):
    """A response of status 200 that no retrieval server would send."""


def check_status(response: httpx.Response) -> None:
    """Raise TransientError for 429 and 5xx, RetrieverRefused for any other failure."""
    status = response.status_code
    if response.is_success:
        return
    if status == httpx.codes.TOO_MANY_REQUESTS or response.is_server_error:
        reason = f"answers {status}: {_excerpt(response)}"
        raise TransientError(reason, parse_retry_after(response.headers))
    fix = FIXES.get(status, "" if status >= httpx.codes.BAD_REQUEST else FIX_ADDRESS)
    raise RetrieverRefused(
        f"retriever {redact(str(response.url))} refused with {status}, expected 200: "
        f"{_excerpt(response, 500)}{fix and '; fix: '}{fix}",
        status,
    )


def _excerpt(response: httpx.Response, length: int = 200) -> str:
    """Return the first `length` bytes as one printable line of UTF-8, whatever the charset."""
    text = response.content[:length].decode("utf-8", "replace")
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def parse_documents(num_queries: int, response: httpx.Response) -> list[list[Document]]:
    parsed = parse_object(response)
    try:
        if not all(isinstance(documents, list) for documents in parsed["result"]):
            raise TypeError("a result that is not a list of documents")
        results = from_wire(parsed)
    except (KeyError, TypeError, AttributeError) as error:
        raise _outside_contract(response, repr(error)) from error
    if len(results) != num_queries:
        raise _outside_contract(response, f"{len(results)} results for {num_queries} queries")
    if re.search(rb"\\u[dD]", response.content):  # JSON can escape half of a surrogate pair
        return [[document.well_formed() for document in documents] for documents in results]
    return results


def parse_document(response: httpx.Response) -> Document:
    try:
        return Document.from_mapping(parse_object(response)["document"]).well_formed()
    except (KeyError, TypeError, AttributeError) as error:
        raise _outside_contract(response, repr(error)) from error


def parse_object(response: httpx.Response) -> dict[str, Any]:
    try:
        parsed = _from_json(response.content)
    except (ValueError, RecursionError) as error:
        raise _outside_contract(response, str(error)) from error
    if not isinstance(parsed, dict):
        raise _outside_contract(response, f"{type(parsed).__name__}, not an object")
    return parsed


def _from_json(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:  # it refuses NaN, half surrogate pairs and other encodings
        return json.loads(content)


def _outside_contract(response: httpx.Response, reason: str) -> InvalidResponse:
    return InvalidResponse(
        f"answered outside the wire contract ({reason}): got {_excerpt(response)!r}; expected "
        '{"result": [[{"document": {"id", "contents", ...}, "score"}]]}; fix: the url'
    )
