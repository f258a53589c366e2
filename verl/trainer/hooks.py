"""What may be added to the training loop: hooks, called at named moments of a run.

`verl.trainer.loop` says when each is called, `verl.trainer.build` which a run has. Hooks are called
in their order; the contexts that they open are nested in the opposite order, so that the first
hook's is the innermost.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.checkpoint.folders import EARLIER_NAMES, RunState
from verl.errors import PluginError, explain
from verl.types import Metrics

if TYPE_CHECKING:
    from verl.trainer.loop import RayPPOTrainer

FileWriter = Callable[[Path], None]
"""Writes files of its own into a checkpoint's folder; may be called in any thread."""


class Stateful:
    """A part of the trainer with a state that checkpoints keep; without one unless overridden."""

    def state_dict(self) -> dict[str, Any]:
        """Return its fields of `RunState`, or others of its own names, as JSON values."""
        return {}

    def load_checkpoint(self, state: RunState, folder: Path) -> None:
        """Restore its fields of `state`, and its own files, from the checkpoint in `folder`."""

    def file_writer(self, state: RunState) -> FileWriter | None:
        """Return what writes its files for a checkpoint of `state`; None if there are none."""
        return None


class Hook(Stateful):
    """Something that happens beside the algorithm; each method is called at its moment."""

    def running(self, trainer: RayPPOTrainer) -> AbstractContextManager[None]:
        """Return the context of the whole run."""
        return nullcontext()

    def during(self, phase: str, trainer: RayPPOTrainer) -> AbstractContextManager[None]:
        """Return the context of a phase: `collect`, `learn`, `prepare` within it, or `validate`.

        Weights change in `learn` only, after `prepare`, which computes the batch's token columns.
        """
        return nullcontext()

    def on_start(self, trainer: RayPPOTrainer) -> None:
        """Called before the engines get the first weights."""

    def on_ready(self, trainer: RayPPOTrainer) -> None:
        """Called when the engines have the weights that training starts with."""

    def on_step_begin(self, trainer: RayPPOTrainer) -> None:
        """Called before a step; may raise to end the run."""

    def on_updated(self, trainer: RayPPOTrainer) -> None:
        """Called after the updates of a step, before the engines get its weights."""

    def on_trained(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Called when the engines have a step's weights; may add metrics, or raise."""

    def on_metrics(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Called next, to add further metrics before they are logged: those of a validation."""

    def on_step_end(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Called when a step is logged."""

    def on_wait(self) -> None:
        """Called every few seconds while the run waits for tools; may raise to end it."""

    def on_end(self, trainer: RayPPOTrainer) -> None:
        """Called after the last step."""

    def stop_reason(self) -> str:
        """Return why the run must save its state and stop; empty if it need not."""
        return ""


class Hooks:
    """All hooks of a run as one."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = hooks

    def call(self, moment: str, *arguments: Any) -> None:
        """Call the method named `moment` of each hook."""
        for hook in self._hooks:
            getattr(hook, moment)(*arguments)

    @contextmanager
    def contexts(self, kind: str, *arguments: Any) -> Iterator[None]:
        """Open the context of each hook; the last one's is the outermost."""
        with contextlib.ExitStack() as stack:
            for hook in reversed(self._hooks):
                stack.enter_context(getattr(hook, kind)(*arguments))
            yield


def joined_writer(parts: Sequence[Stateful], state: RunState) -> FileWriter:
    """Return what writes the files of all parts for a checkpoint of `state`."""
    writers = [writer for part in parts if (writer := part.file_writer(state)) is not None]

    def write(folder: Path) -> None:
        for writer in writers:
            writer(folder)

    return write


def merged_state(parts: Sequence[Stateful]) -> Mapping[str, Any]:
    """Return the fields of all parts' states; no two parts may have the same one.

    Raises PluginError if a user's hook has a field of ours, which would be read back as ours.
    """
    state: dict[str, Any] = {}
    fields = {*EARLIER_NAMES, *(field.name for field in dataclasses.fields(RunState))}
    for part in parts:
        own, kind = part.state_dict(), type(part)
        taken = state.keys() if kind.__module__.startswith("verl.") else state.keys() | fields
        if same := sorted(taken & own.keys()):
            subject, got = f"state_dict of {kind.__name__}", ", ".join(same)
            raise PluginError(explain(subject, got, "names of its own", "choose others"))
        state |= own
    return state
