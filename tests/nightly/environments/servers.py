"""Serves OpenEnv environments to the tests, by openenv's own server."""

import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from search_r1.environments.openenv_task import build_app
from tests.nightly.environments.task import retrieval


class Guess(Action):
    """Guess the number."""

    number: int


class Hint(Observation):
    message: str


class Game(Environment):
    """An environment with an action of its own: a number from its reset is to be guessed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, secret: int = 0
    ) -> Hint:
        self.secret = secret
        return Hint(message="Guess a number.")

    def step(self, action: Guess, timeout_s: float | None = None) -> Hint:
        if action.number == self.secret:
            return Hint(message="right", reward=1.0, done=True)
        return Hint(message="higher" if action.number < self.secret else "lower", reward=-0.25)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    apps = {
        "search": lambda: build_app(retrieval, sessions=4),
        "game": lambda: create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=1),
    }
    uvicorn.run(apps[sys.argv[1]](), port=int(sys.argv[2]), log_level="warning")
