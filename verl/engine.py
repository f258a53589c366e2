"""`RolloutEngine`: what continues token ids, takes new weights, and gives its memory back.

Only `generate` must be written; the rest has defaults for an engine that needs no start, holds no
device memory and keeps its weights. `verl.rollout.interface` chooses one by name.
"""

# ruff: noqa: B027 - an engine that has nothing to do in a call leaves it as it is here

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

from verl.config import Config
from verl.types import Completion, Sampling

Listener = Callable[[str], None]
"""Hears new text of a completion."""
INTERRUPTED = "interrupted"
"""The finish reason of a completion that `RolloutEngine.interrupt` ended."""


class EngineDied(Exception):
    """The engine behind this object is gone; every further call raises this too."""


class RolloutEngine(ABC):
    """One engine; it belongs to the event loop that starts it, and serves any number of requests.

    The trainer's order of calls is `start`, then again and again `wake_up`, `update_weights`, any
    number of `generate` at once, `sleep`; `shutdown` at the end. `probe` may come at any time.
    With devices of its own (`trainer.rollout_gpus`) it neither sleeps nor wakes. Any call may raise
    EngineDied.
    """

    takes_weights: ClassVar[bool] = False
    """Whether `update_weights` works; without it the engine cannot be trained with."""
    takes_adapters: ClassVar[bool] = False
    """Whether `update_weights` also takes a LoRA adapter by itself; else it is merged before."""
    can_interrupt: ClassVar[bool] = False
    """Whether `interrupt` works, which `rollout.interrupt_turns` needs."""
    can_receive: ClassVar[bool] = False
    """Whether `cards` and `receive_weights` work, for any `rollout.weight_sync` but files."""

    @classmethod
    def from_config(cls, config: Config, replica: int) -> Self:
        """The engine of a run, not started; `replica` numbers it among the run's engines."""
        return cls(config, replica)  # type: ignore[call-arg]  # the constructor a plug-in writes

    async def start(self) -> None:
        """Load the model. Raises ModelError."""

    @abstractmethod
    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue `prompt_ids`; the stop string that ended the text is part of ids and text.

        `log_probs` are those of the distribution that was sampled from, after temperature and
        top-p; NaN where the engine does not tell them.
        """
        ...

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, listener: Listener
    ) -> Completion:
        """As `generate`; `listener` hears new text as it is sampled, here all of it at the end."""
        completion = await self.generate(prompt_ids, sampling)
        listener(completion.text)
        return completion

    async def update_weights(self, folder: str, version: int, is_adapter: bool = False) -> None:
        """Compute with the weights of a Hugging Face folder, and forget what the old ones cached.

        With `is_adapter`, with the adapter of peft's folder over the weights of `start`, in place
        of the adapter before. Completions carry `version` from now on; no request is running.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no weights")

    async def cards(self) -> list[str]:
        """The device of each of its workers, as `weight_stream.device_key` names it."""
        raise NotImplementedError(f"{type(self).__name__} receives no weights")

    async def receive_weights(self, stream: str, version: int) -> None:
        """As `update_weights`, with what `weight_stream.send` gives to the workers."""
        raise NotImplementedError(f"{type(self).__name__} receives no weights")

    async def interrupt(self) -> None:
        """End what is being sampled: each completion has the tokens so far, be it none, and says
        that it is INTERRUPTED. Nothing new is asked for until this has returned."""
        raise NotImplementedError(f"{type(self).__name__} interrupts nothing")

    async def sleep(self) -> None:
        """Give device memory to the trainer; weights may be dropped."""

    async def wake_up(self) -> None:
        """Take device memory back; `update_weights` follows if weights were dropped."""

    async def probe(self) -> None:
        """Return when the engine shows that it lives, or raise EngineDied."""

    async def shutdown(self) -> None:
        """End the engine with its processes; harmless if it never started or has ended."""


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """`text` up to the end of the stop string that ends first, and whether there is one."""
    ends = [text.index(tag) + len(tag) for tag in stop if tag in text]
    return (text[: min(ends)], True) if ends else (text, False)
