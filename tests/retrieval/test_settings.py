"""docs/reference/retriever.md lists all flags, statuses and metrics."""

import ast
import dataclasses
import inspect
import itertools
from pathlib import Path

import pytest

from search_r1.retrieval.command import main
from search_r1.retrieval.service.app import create_app
from search_r1.retrieval.service.requests import STATUSES
from search_r1.retrieval.settings import ServiceConfig
from tests.retrieval.service.fake_backends import FakeBackend

MANUAL = (Path(__file__).parents[2] / "docs" / "reference" / "retriever.md").read_text()


def test_the_manual_lists_every_flag() -> None:
    """The page has the name, default and meaning of every service option."""
    body = ast.parse(inspect.getsource(ServiceConfig)).body[0].body  # type: ignore[attr-defined]
    docs = {
        field.target.id: doc.value.value
        for field, doc in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
    }
    for field in dataclasses.fields(ServiceConfig):
        default = "" if field.default is None else f"{field.default} "
        assert f"| `--{field.name}` | {default}| {docs[field.name]} |" in MANUAL


def test_the_manual_lists_every_status_and_metric() -> None:
    """The page has every error status, and every metric under its Prometheus name."""
    for status in STATUSES:
        assert f"\n| {status} | " in MANUAL
    text = create_app(FakeBackend()).state.service.metrics.text().decode()
    for line in text.splitlines():
        if line.startswith("# TYPE") and not line.split()[2].endswith("_created"):
            assert line.split()[2] in MANUAL


def test_help_says_where_the_token_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    """There is no flag for the token; the help names the environment variable."""
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    assert "RETRIEVER_TOKEN" in text
    assert "--token" not in text and "-token" not in text
