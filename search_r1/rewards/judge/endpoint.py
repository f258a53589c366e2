"""Verdicts of the judge's server."""

from search_r1.chat import ChatEndpoint, ChatRefused
from search_r1.retrying import Backoff, TransientError, call_with_retries
from search_r1.rewards.judge.judge_options import JudgeOptions
from search_r1.rewards.judge.message import parse_verdict

MAX_PAUSE_S = 30.0


class JudgeFailed(Exception):
    """The judge gave no verdict."""


class JudgeEndpoint:
    """The judge, for all batches of a run and from any thread."""

    def __init__(self, options: JudgeOptions) -> None:
        """Raises ValueError for an invalid address; it connects with the first request."""
        self._options = options
        self._chat = ChatEndpoint(options, "judge")
        self._backoff = Backoff(options.first_pause, MAX_PAUSE_S, MAX_PAUSE_S)

    def judge(self, message: str) -> float:
        """Return the verdict on one message, 0 to 1. Raises JudgeFailed after all retries."""
        try:
            return call_with_retries(
                lambda: self._request(message), self._options.max_retries, self._backoff
            )
        except TransientError as error:
            raise JudgeFailed(str(error)) from error
        except ChatRefused as error:
            hint = "; judge.body replaces fields of the request" * error.is_about_fields
            raise JudgeFailed(f"{error}{hint}") from error

    def _request(self, message: str) -> float:
        """Ask once. Raises TransientError, ChatRefused, or JudgeFailed for a reply cut short."""
        reply = self._chat.ask(message)
        score = parse_verdict(reply.text, self._options.verdict)
        if score is None and reply.is_cut:
            fields = self._chat.fields(message)
            limits = ", ".join(f"{name}={fields[name]}" for name in fields if "tokens" in name)
            fix = "raise judge.max_tokens (in evaluations, by --judge-body)"
            raise JudgeFailed(f"no verdict: the reply was cut off at {limits}; fix: {fix}")
        if score is None:
            raise TransientError(f"no verdict: {reply.text[:200]}")
        return score
