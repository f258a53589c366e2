"""The tool `visit`: documents by id from a real server, pages within the address rules."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from search_r1.agent.visit import VisitTool
from search_r1.online.pages import Article
from search_r1.retrieval.client import RetrievalClient
from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.errors import RetrieverUnavailable
from search_r1.retrieval.schema import Document
from search_r1.retrieval.service.app import create_app
from tests.apps import running
from tests.retrieval.service.fake_backends import FakeBackend
from verl.agent.interface import Observation
from verl.errors import ToolError


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """A corpus of documents whose ids are not row numbers."""
    path = tmp_path / "corpus.jsonl"
    rows = [Document.from_title(id, id.title(), f"About {id}.") for id in ("a/b c", "é", "1")]
    path.write_text(
        "".join(f'{{"id": "{r.id}", "title": "{r.title}", "text": "{r.text}"}}\n' for r in rows)
    )
    return Corpus.open(path)


def visit(tool: VisitTool, target: str) -> Observation:
    async def main() -> Observation:
        try:
            return await tool.call(target=target)
        finally:
            await tool.aclose()

    return asyncio.run(main())


def test_a_document_comes_whole_by_its_id(corpus: Corpus) -> None:
    """Ids with any characters are found over HTTP; the policy sees a message for unknown ids."""
    with running(create_app(FakeBackend(), find=corpus.find)) as url:
        tool = VisitTool(RetrievalClient(url))
        (item,) = visit(tool, "a/b c").items
        assert (item.title, item.text, item.id) == ("A/B C", "About a/b c.", "a/b c")
        assert visit(tool, "é").items[0].text == "About é."
        assert visit(tool, "nothing").items[0].text == "Error: no document has the id 'nothing'"
    with running(
        create_app(FakeBackend())
    ) as url:  # like a server without a corpus, or an older one
        tool = VisitTool(RetrievalClient(url))
        assert visit(tool, "1").items[0].text.startswith("Error: no document")


def test_a_server_that_is_away_fails_the_trajectory() -> None:
    """An infrastructure failure is a counted ToolError, not an observation for the policy."""

    class UnavailableServer:
        async def document(self, id: str) -> Document | None:
            raise RetrieverUnavailable("away")

    with pytest.raises(ToolError) as caught:
        visit(VisitTool(UnavailableServer()), "1")
    assert caught.value.faults["visits_failed"] == 1


def test_a_page_is_opened_by_its_address() -> None:
    """An address is opened as a page, never looked up as a document id."""
    tool = VisitTool(None, lambda url: Article("Lima", f"text of {url}"))
    (item,) = visit(tool, "https://a.example/x").items
    assert (item.title, item.text, item.id) == (
        "Lima", "text of https://a.example/x", "https://a.example/x",
    )  # fmt: skip


@pytest.mark.parametrize("url", ["http://127.0.0.1/", "http://169.254.169.254/latest"])
def test_addresses_that_are_not_public_are_refused(url: str) -> None:
    """A policy cannot reach this machine or a cloud's metadata service."""
    (item,) = visit(VisitTool(None), url).items
    assert item.text.startswith("Error: ") and "public" in item.text


def test_without_documents_the_policy_is_told() -> None:
    """Without a retriever, the observation says that there are no documents."""
    assert visit(VisitTool(None), "7").items[0].text == "Error: there are no documents"


def test_rows_are_found_by_number_or_by_hash(corpus: Corpus, tmp_path: Path) -> None:
    """Ids equal to row numbers are read by row; ids that only look like numbers are looked up."""
    first = corpus.find("1")
    assert first is not None and first.title == "1"
    assert corpus.find("0") is None
    path = tmp_path / "numbered.jsonl"
    path.write_text("".join(f'{{"id": "{n}", "contents": "t\\nx{n}"}}\n' for n in range(5)))
    numbered = Corpus.open(path)
    assert [numbered.find(str(n)) for n in range(5)] == list(numbered)
    assert "_rows_by_id" not in vars(numbered)
