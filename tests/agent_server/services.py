"""A service with a scripted agent on a real port."""

from __future__ import annotations

from contextlib import AbstractContextManager

from search_r1.agent_server.app import Service, build_app
from search_r1.inference.dialogue import AgentSession
from tests.apps import running

MODEL = "search-r1"


def serving(
    session: AgentSession, token: str | None = None, peers: tuple[str, ...] = (), port: int = 0
) -> AbstractContextManager[str]:
    """The base address of a service of `session`, ended with the context."""
    return running(build_app(Service(session, MODEL, token, peers=peers)), port)
