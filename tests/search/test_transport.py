"""Settings of the transport, and how an answer is shown."""

import pytest

from search_r1.search.transport import Answer, Patience


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"timeout": float("nan")}, {"max_retries": -1}])
def test_settings_that_could_never_answer_are_refused(wrong: dict[str, float]) -> None:
    """The message names the setting and what was expected."""
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} .*expected"):
        Patience(**wrong)  # type: ignore[arg-type]


def test_excerpts_of_any_charset() -> None:
    """A body that lies about its charset still has an excerpt."""
    headers = {"Content-Type": "text/plain; charset=base64"}
    assert Answer("http://a", 500, b"ab\xff", headers).excerpt(3) == "ab\ufffd"
