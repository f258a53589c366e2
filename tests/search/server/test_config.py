"""The manual against the flags, the statuses and the metrics that there are."""

import dataclasses
from pathlib import Path

from search_r1.search.retrieval_server import parser
from search_r1.search.server.app import create_app
from search_r1.search.server.config import ServiceConfig
from search_r1.search.server.statuses import STATUSES
from tests.search.server.engines import Watched

MANUAL = (Path(__file__).parents[3] / "docs" / "retriever.md").read_text()


def test_the_manual_lists_every_flag() -> None:
    """Name, default and meaning of every option of the service."""
    for field in dataclasses.fields(ServiceConfig):
        default = "" if field.default is None else f"{field.default} "
        row = f"| `--{field.name}` | {default}| {field.metadata['help']} |"
        assert row in MANUAL


def test_the_manual_lists_every_status_and_metric() -> None:
    """Statuses of errors, and names of metrics as Prometheus reads them."""
    for status in STATUSES:
        assert f"\n| {status} | " in MANUAL
    text = create_app(Watched()).state.service.metrics.text().decode()
    for line in text.splitlines():
        if line.startswith("# TYPE") and not line.split()[2].endswith("_created"):
            assert line.split()[2] in MANUAL


def test_help_says_where_the_token_comes_from() -> None:
    """No flag takes the token; the help names the environment variable."""
    text = parser().format_help()
    assert "RETRIEVER_TOKEN" in text
    assert not any("token" in action.dest for action in parser()._actions)
