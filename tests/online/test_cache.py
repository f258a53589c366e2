"""The answers on disk: exact, shared, and never in the way of an answer."""

from pathlib import Path

import pytest

from search_r1.online import cache as cache_module
from search_r1.online.cache import open_cache
from search_r1.online.service import Found
from search_r1.search.errors import SetupError

FOUND = [Found("https://a/", "A 湖", "text\u2028", 0.1 + 0.2), Found("https://b/", "", "")]


def test_keeps_answers_by_scope_query_and_k(tmp_path: Path) -> None:
    """What was kept comes back equal, also from a new process; anything else is a miss."""
    cache = open_cache(tmp_path / "c")
    cache.keep_answer("google", "river", 3, FOUND)
    cache.keep_answer("google", "nothing", 3, [])
    cache.keep_page("2000", "https://a/", "page")
    cache.close()
    cache = open_cache(tmp_path / "c")
    assert cache.answer("google", "river", 3) == FOUND
    assert cache.answer("google", "nothing", 3) == []
    for key in (("brave", "river", 3), ("google", "River", 3), ("google", "river", 2)):
        assert cache.answer(*key) is None
    assert cache.page("2000", "https://a/") == "page"
    assert cache.page("2000", "https://b/") is None
    cache.close()


def test_the_last_answers_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a file the last used answers and pages are kept, older ones forgotten."""
    monkeypatch.setattr(cache_module, "NUM_RECENT_ANSWERS", 2)
    monkeypatch.setattr(cache_module, "NUM_RECENT_PAGES", 1)
    cache = open_cache(None)
    cache.keep_answer("s", "a", 1, FOUND)
    cache.keep_answer("s", "b", 1, [])
    assert cache.answer("s", "a", 1) == FOUND
    cache.keep_answer("s", "c", 1, FOUND)
    assert [cache.answer("s", query, 1) for query in "abc"] == [FOUND, None, FOUND]
    assert cache.answer("s", "a", 2) is cache.answer("other", "a", 1) is None
    cache.keep_page("s", "u", "text")
    assert cache.page("s", "u") == "text"
    cache.keep_page("s", "v", "more")
    assert (cache.page("s", "u"), cache.page("s", "v")) == (None, "more")


def test_what_is_no_cache_is_refused(tmp_path: Path) -> None:
    """A file of another kind, or a folder that is missing, is said at start and left alone."""
    (tmp_path / "corpus.jsonl").write_text('{"id": "1"}\n' * 100)
    for path in (tmp_path / "corpus.jsonl", tmp_path / "none" / "c"):
        with pytest.raises(SetupError, match="--online_cache"):
            open_cache(path)
    assert (tmp_path / "corpus.jsonl").read_text() == '{"id": "1"}\n' * 100


def test_a_failing_disk_costs_only_the_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """When the file cannot be used any more, reads miss, writes pass, and the log says so."""
    cache = open_cache(tmp_path / "c")
    cache.close()
    cache.keep_answer("s", "q", 1, FOUND)
    assert cache.answer("s", "q", 1) is None
    assert "is not used for now" in caplog.text
