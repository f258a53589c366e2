"""Keys: read from the environment, and kept out of every log line and error."""

import logging
import os
from urllib.parse import quote, quote_plus

from search_r1.online.service import Credentials, Service
from search_r1.search.errors import SetupError

CHATTY = ("httpx", "httpcore.connection", "httpcore.http11", "httpcore.http2", "httpcore.proxy")
"""Loggers that write addresses or headers; Google's and SerpAPI's keys are part of an address."""

_secrets: set[str] = set()


def read_credentials(service: Service) -> Credentials:
    """The service's key and setting; raises SetupError naming the variable to set."""
    credentials = Credentials(*(_read(service, variable) for variable in service.variables))
    key = credentials.key
    _secrets.update((key, quote(key), quote_plus(key), key.replace("/", r"\/")))  # URLs and JSON
    for name in CHATTY:
        logging.getLogger(name).addFilter(_hide_record)  # adding one twice is adding it once
    return credentials


def hide(text: str) -> str:
    """`text` with every key that was read replaced by stars."""
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _read(service: Service, variable: str) -> str:
    value = os.environ.get(variable, "").strip()
    if not value:
        raise SetupError(
            f"--retriever_name {service.name} without the environment variable {variable}; "
            f"it needs {' and '.join(service.variables)}: export what its account page shows"
        )
    if not all("!" <= character <= "~" for character in value):
        raise SetupError(
            f"the value of {variable} has spaces or characters outside ASCII, which no key of "
            f"{service.name} has; set it again, without quotes and line breaks"
        )
    return value


def _hide_record(record: logging.LogRecord) -> bool:
    """A log filter that lets every record pass, without keys."""
    record.msg, record.args = hide(record.getMessage()), ()
    return True
