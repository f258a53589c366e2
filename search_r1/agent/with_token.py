"""Takes the retriever's token along to the processes of a run."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from search_r1.retrieval.schema import TOKEN_VARIABLE
from verl.config import Config

Built = TypeVar("Built")


@dataclass(frozen=True)
class WithToken(Generic[Built]):
    """A factory that carries the retriever's token; Ray would log an environment variable."""

    make: Callable[[Config], Built]
    token: str | None = field(default_factory=lambda: os.environ.get(TOKEN_VARIABLE), repr=False)

    def __call__(self, config: Config) -> Built:
        """Set the token in this process's environment, then call the factory."""
        if self.token is not None:
            os.environ[TOKEN_VARIABLE] = self.token
        return self.make(config)
