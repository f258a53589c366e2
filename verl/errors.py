"""The exceptions of the trainer: mistakes a user can fix, told apart from bugs.

    SearchR1Error
    ├── ConfigError      an option that is unknown, of the wrong type, or cannot work with others
    ├── DataError        a file or row of questions that cannot be used
    ├── ModelError       weights or tokenizer that cannot be loaded
    ├── ResourceError    too few devices, or too little disk
    ├── RetrieverError   the search server does not answer, or answers something else
    ├── CollapseError    the collapse guard ended the run; exit status 3
    ├── RetrieverOutage  the search server stayed away too long in mid-run; exit status 4
    ├── Interrupted      asked to stop, or out of time, and saved; exit status 75
    ├── SaveError        a checkpoint that could not be written, twice in a row or at the end
    ├── RankLost         a training rank died; the run goes on from its last checkpoint, or, more
    │                    often than `trainer.max_restarts` allows, ends; exit status 5
    ├── ReplicaLost      a rollout replica died and cannot be replaced; likewise
    └── PreflightError   several of the above, found together before any work

An entry point prints the message of these and exits with `exit_code`; anything else is a bug and
keeps its traceback. A message names what was got, what was expected, and the fix.
"""

from __future__ import annotations

from collections.abc import Sequence


class SearchR1Error(Exception):
    """Root of the tree; its message is for the user."""

    exit_code = 2


class ConfigError(SearchR1Error):
    """An option that is unknown, of the wrong type, or at odds with another."""


class DataError(SearchR1Error):
    """A file or row of questions that cannot be used."""


class ModelError(SearchR1Error):
    """Weights or tokenizer that cannot be loaded."""


class ResourceError(SearchR1Error):
    """Too few devices, or too little disk, for the settings."""


class RetrieverError(SearchR1Error):
    """A search server that does not answer, or answers something else."""


class CollapseError(SearchR1Error):
    """The policy collapsed in mid-run; the message names the last healthy checkpoint."""

    exit_code = 3


class RetrieverOutage(RetrieverError):
    """The search server stayed away for longer than `retriever.max_outage`; the run was saved."""

    exit_code = 4


class Interrupted(SearchR1Error):
    """The run was asked to stop, or its time is nearly over; it was saved and can go on.

    The exit status is EX_TEMPFAIL: the same command goes on with `trainer.resume_mode=auto`.
    """

    exit_code = 75


class SaveError(SearchR1Error):
    """A checkpoint that could not be written; the ones before it are as they were."""


class RankLost(SearchR1Error):
    """A training rank died, and with it what it held of the weights."""

    exit_code = 5


class ReplicaLost(SearchR1Error):
    """A rollout replica died and cannot be replaced, or no more."""

    exit_code = 5


class PreflightError(SearchR1Error):
    """All that stands in the way of a run, one problem a line."""

    def __init__(self, problems: Sequence[SearchR1Error]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"the run cannot start, {len(self.problems)} problem(s):\n{lines}")


def explain(subject: str, got: object, expected: str, fix: str) -> str:
    """The one-line wording of a user's mistake.

    Example: `explain("max_turns", "-1", "1 or more", "set max_turns=2")` is
    `max_turns: got -1, expected 1 or more; fix: set max_turns=2`.
    """
    return f"{subject}: got {got}, expected {expected}; fix: {fix}"
