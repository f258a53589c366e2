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
    """``verl.config.JudgeConfig`` says what these are, whose defaults they have."""

    url: str = ""
    model: str = ""
    api_key: str | None = field(default=None, repr=False)
    verdict: str = "yes_no"
    prompt: str | None = None
    timeout: float = 60.0
    max_retries: int = 3
    max_concurrency: int = 32
    max_tokens: int = 16
    max_answer_chars: int = 500
    cache_path: str | None = None
    first_pause: float = 0.5
    """Seconds before the second try; each further pause is twice as long, 30 at most."""

    def __post_init__(self) -> None:
        """Refuse what no header can hold, and an address with a password: addresses are logged."""
        fix = "fix: give the key alone, in the environment variable that api_key_env names"
        if "@" in urlsplit(self.url).netloc:
            raise ValueError(f"judge.url: got a password in it, expected http://HOST/v1; {fix}")
        if self.api_key is not None and not re.fullmatch(r"[!-~]+", self.api_key):
            raise ValueError(f"judge's key: got a text with spaces or beyond ASCII; {fix}")
