"""What the judge is told and how it is reached; plain data, so that no client is needed for it."""

import os
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit


def key_in(variable: str | None, option: str) -> str | None:
    """The judge's key, from the one environment variable that `option` names; None names none."""
    if variable is None:
        return None
    if key := os.environ.get(variable, "").strip():
        return key
    expected = "a variable that holds the judge's key"
    raise ValueError(f"{option}: got {variable}, expected {expected}; fix: export {variable}=KEY")


@dataclass(frozen=True)
class JudgeOptions:
    """See ``verl.config.JudgeConfig``, whose defaults are these."""

    url: str = ""
    """Base address of an OpenAI-compatible endpoint; /chat/completions is added."""
    model: str = ""
    """Name of the model there."""
    api_key: str | None = field(default=None, repr=False)
    """The endpoint's key, if it wants one; never logged."""
    verdict: str = "yes_no"
    """``yes_no``, or ``score`` for a number from 0 to 1."""
    prompt: str | None = None
    """Own wording with {question}, {accepted} and {answer}."""
    timeout: float = 60.0
    """Seconds that one request may take, to the last byte of its answer."""
    max_retries: int = 3
    """Further tries after a failure or a reply that is no verdict."""
    max_concurrency: int = 32
    """Requests at a time."""
    max_tokens: int = 16
    """Tokens of a reply."""
    max_answer_chars: int = 500
    """The answer is shown up to here."""
    cache_path: str | None = None
    """A sqlite file of verdicts, which several runs may share."""
    first_pause: float = 0.5
    """Seconds before the second try; each further pause is twice as long, 30 at most."""

    def __post_init__(self) -> None:
        """Refuse what no header can hold, and an address with a password: addresses are logged."""
        fix = "fix: give the key alone, in the environment variable that api_key_env names"
        if "@" in urlsplit(self.url).netloc:
            raise ValueError(f"judge.url: got a password in it, expected http://HOST/v1; {fix}")
        if self.api_key is not None and not re.fullmatch(r"[!-~]+", self.api_key):
            raise ValueError(f"judge's key: got a text with spaces or beyond ASCII; {fix}")
