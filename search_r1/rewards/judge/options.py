"""What the judge is told and how it is reached; plain data, so that no client is needed for it."""

from dataclasses import dataclass, field


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
    """Seconds to connect, and for each part of the reply."""
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
