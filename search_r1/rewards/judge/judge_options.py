"""Options of the LLM judge as plain data, importable without an HTTP client."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

OWN = ("temperature", "max_tokens", "max_completion_tokens")
"""Fields of our requests that `body` may remove by null."""


def read_key(variable: str | None, option: str) -> str | None:
    """Read the judge's API key from an environment variable, which `option` names; None: no key."""
    if variable is None:
        return None
    if key := os.environ.get(variable, "").strip():
        return key
    expected = "a variable that holds the judge's key"
    raise ValueError(f"{option}: got {variable}, expected {expected}; fix: export {variable}=KEY")


@dataclass(frozen=True)
class JudgeOptions:
    """What docs/guides/rewards.md describes, with the defaults."""

    url: str = ""
    model: str = ""
    api_key: str | None = field(default=None, repr=False)
    verdict: str = "yes_no"
    prompt: str | None = None
    timeout: float = 60.0
    max_retries: int = 3
    max_concurrency: int = 32
    max_tokens: int = 16
    body: Mapping[str, Any] = field(default_factory=dict)
    cache_path: str | None = None
    first_pause: float = 0.5
    """Seconds before the first retry; the pause doubles with each retry, up to 30."""

    def __post_init__(self) -> None:
        """Refuse keys no header can contain, passwords in the URL, and fields that are ours."""
        fix = "fix: give the key alone, in the environment variable that api_key_env names"
        if "@" in urlsplit(self.url).netloc:
            raise ValueError(f"judge.url: got a password in it, expected http://HOST/v1; {fix}")
        if self.api_key is not None and not re.fullmatch(r"[!-~]+", self.api_key):
            raise ValueError(f"judge's key: got a text with spaces or beyond ASCII; {fix}")
        if own := self.body.keys() & {"messages", "model", "stream", "n"}:
            fix = "leave them out; judge.model and judge.prompt set what they can"
            raise ValueError(
                f"judge.body: got {', '.join(sorted(own))}, expected others; fix: {fix}"
            )
        absent = [name for name, value in self.body.items() if value is None and name not in OWN]
        if absent:
            expected = f"a field that requests have: {', '.join(OWN)}"
            raise ValueError(
                f"judge.body: got null for {', '.join(absent)}, expected {expected}; fix: leave "
                "it out, or correct the name"
            )
        try:
            json.dumps(dict(self.body), allow_nan=False)
        except (TypeError, ValueError) as error:
            expected = "values that JSON has"
            raise ValueError(f"judge.body: got {error}, expected {expected}") from error
