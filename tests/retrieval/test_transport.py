"""Settings of the transport, and excerpts of responses."""

import pytest

from search_r1.retrieval.transport import Response, RetryPolicy


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"timeout": float("nan")}, {"max_retries": -1}])
def test_settings_that_could_never_answer_are_refused(wrong: dict[str, float]) -> None:
    """The message names the setting and what was expected."""
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} .*expected"):
        RetryPolicy(**wrong)  # type: ignore[arg-type]


def test_excerpts_of_any_charset() -> None:
    """A body with a wrong charset still has an excerpt."""
    headers = {"Content-Type": "text/plain; charset=base64"}
    assert Response("http://a", 500, b"ab\xff", headers).excerpt(3) == "ab\ufffd"
