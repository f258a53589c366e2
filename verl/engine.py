"""The `RolloutEngine` interface: generates completions, loads new weights, and frees its memory.

Only `generate` must be implemented. The other methods have defaults that suit an engine which needs
no start, holds no device memory and never changes its weights. `verl.rollout.interface` selects an
engine by name.
"""

# ruff: noqa: B027 - the methods without a body are optional hooks

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from verl.config import Config
from verl.errors import UserError
from verl.types import Completion, Sampling

Listener = Callable[[str], None]
"""Called with each new piece of a completion's text."""


@dataclass(frozen=True)
class Score:
    """What an engine computes for a fixed sequence with the weights of one version."""

    replica: int
    version: int
    log_probs: tuple[float, ...] | None
    """Of each id after the first, at temperature 1; None if the engine cannot compute them."""


class EngineDied(Exception):
    """The engine behind this object has died; every further call raises this too."""


class RolloutEngine(ABC):
    """An inference engine. It is used from the event loop that started it, by concurrent requests.

    The trainer calls `start_for_training` once, then repeats `wake_up`, `update_weights`, any
    number of concurrent `generate` and `sleep`, and finally calls `shutdown`. `probe` may be called
    at any time. An engine on devices of its own (`trainer.rollout_gpus`) never sleeps. Every method
    may raise EngineDied.
    """

    takes_weights: ClassVar[bool] = False
    """Whether `update_weights` is implemented, which training requires."""
    takes_streams: ClassVar[bool] = False
    """Whether `update_weights` also accepts `NAME://ADDRESS` of a transport without files, whose
    receiver runs in each worker (`verl.weights.files`); `devices` is implemented then."""

    @classmethod
    def from_config(cls, config: Config, replica: int) -> Self:
        """Build the engine of a run without starting it; `replica` is its number in the run."""
        return cls(config, replica)  # type: ignore[call-arg]  # the constructor a plug-in writes

    @classmethod
    def problems(cls, config: Config) -> Iterator[UserError]:
        """Yield why the engines of a run cannot be started, as far as that is known before."""
        yield from ()

    async def start(self) -> None:
        """Load the model. Raises ModelError."""

    async def start_for_training(self) -> None:
        """Like `start`; weights may be left out, since the ranks' weights follow at once."""
        await self.start()

    @abstractmethod
    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue `prompt_ids`.

        The ids and text include the stop string that ended the completion. `log_probs` are taken
        from the distribution that was sampled, after temperature and top-p; NaN if the engine does
        not report them.
        """

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, listener: Listener
    ) -> Completion:
        """Like `generate`, but call `listener` with new text as it is sampled.

        By default it is called once, at the end, with the whole text.
        """
        completion = await self.generate(prompt_ids, sampling)
        listener(completion.text)
        return completion

    async def update_weights(self, folder: str, version: int) -> None:
        """Load the weights of a Hugging Face folder and drop everything cached from the old ones.

        No request is running during the call, and completions report `version` after it.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot update its weights")

    async def devices(self) -> list[str]:
        """Return the `verl.training.devices.device_id` of each worker."""
        raise NotImplementedError(f"{type(self).__name__} cannot receive weights")

    async def score(self, ids: Sequence[int]) -> Sequence[float] | None:
        """Return the log-prob of each id after the first, at temperature 1; None if it cannot.

        Called between requests, right after new weights were loaded. It must leave no trace in
        later requests: neither in random states nor in a prefix cache.
        """
        return None

    async def sleep(self) -> None:
        """Free device memory for the trainer; weights may be dropped."""

    async def wake_up(self) -> None:
        """Allocate device memory again; `update_weights` follows if weights were dropped."""

    async def probe(self) -> None:
        """Return once the engine shows that it is alive, or raise EngineDied."""

    async def shutdown(self) -> None:
        """Stop the engine and its processes; does nothing if it never started or has stopped."""
