"""An agent server with a scripted agent on a real port."""

from __future__ import annotations

from contextlib import AbstractContextManager

from search_r1.agent_server.service import AgentService, build_app
from search_r1.inference.dialogue import AgentSession
from tests.apps import running

MODEL = "search-r1"


def serving(
    session: AgentSession, token: str | None = None, peers: tuple[str, ...] = (), port: int = 0
) -> AbstractContextManager[str]:
    """Serve `session` and provide the server's base address."""
    return running(build_app(AgentService(session, MODEL, token, peers=peers)), port)
