"""The search task as an OpenEnv environment: the tool `search`, and exact match of the answer.

Written for openenv 0.10. An episode is one question: `reset(question=…,
ground_truth=[…])`, calls of `search`, and a call of `answer`, which ends it with reward 0 or 1.
`answer` is not listed, since a policy of ours answers in its own format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_types import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
    ToolError,
    ToolErrorType,
)
from openenv.core.env_server.types import Action, Observation, State

from search_r1.agent.search import SearchTool
from search_r1.retrieval.errors import SearchError
from search_r1.retrieval.protocol import Retrieval
from search_r1.rewards.normalize import matches_exactly

ANSWER = "answer"


class SearchEnvironment(Environment):  # type: ignore[misc] # mypy does not see the optional package
    """One session: a question with its accepted answers."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, retrieval: Retrieval) -> None:
        super().__init__()
        self.retrieval = retrieval
        self.accepted: tuple[str, ...] = ()
        self._state = State()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, question: str = "",
        ground_truth: Sequence[str] = (),
    ) -> Observation:  # fmt: skip
        """Begin an episode; the question itself is in the prompt."""
        self.accepted = tuple(ground_truth)
        self._state = State(episode_id=episode_id, step_count=0)
        return Observation()

    def step(self, action: Action, timeout_s: float | None = None) -> Observation:
        raise NotImplementedError("sessions are asynchronous")

    async def step_async(self, action: Action, timeout_s: float | None = None) -> Observation:
        """List the tools, search, or end the episode with an answer."""
        if isinstance(action, ListToolsAction):
            tool = Tool(
                name=SearchTool.name,
                description=SearchTool.description,
                input_schema=SearchTool.parameters,
            )
            return ListToolsObservation(tools=[tool])
        assert isinstance(action, CallToolAction), f"OpenEnv validates actions, got {action!r}"
        self._state.step_count += 1
        name, arguments = action.tool_name, action.arguments
        if name == ANSWER and isinstance(given := arguments.get(ANSWER), str):
            is_right = matches_exactly(given, self.accepted)
            return CallToolObservation(tool_name=name, done=True, reward=float(is_right))
        if name == SearchTool.name and isinstance(query := arguments.get("query"), str):
            return await self._search(query)
        message = f"got {name} with {sorted(arguments)}, expected search(query) or answer(answer)"
        error = ToolError(error_type=ToolErrorType.INVALID_ARGS, message=message)
        return CallToolObservation(tool_name=name, error=error)

    async def _search(self, query: str) -> CallToolObservation:
        try:
            documents = await self.retrieval.search(query)
        except SearchError as failure:
            error = ToolError(error_type=ToolErrorType.TRANSPORT_ERROR, message=str(failure))
            return CallToolObservation(tool_name=SearchTool.name, error=error)
        found = [{"id": d.id, "title": d.title, "text": d.text} for d in documents]
        return CallToolObservation(tool_name=SearchTool.name, result=found)

    @property
    def state(self) -> State:
        return self._state


def build_app(retrieval: Callable[[], Retrieval], sessions: int) -> Any:
    """Build the server of the search task, with at most so many concurrent episodes."""
    return create_fastapi_app(
        lambda: SearchEnvironment(retrieval()), Action, Observation, max_concurrent_envs=sessions
    )
