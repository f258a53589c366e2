"""The exceptions that a user is told of, told apart from bugs; tools and servers root theirs here.

    UserError
    ├── ConfigError      an option that is unknown, of the wrong type, or cannot work with others
    │   └── AnswerInvalid  what an option names answers, but not as it should
    ├── DataError        a file or row of questions that cannot be used
    ├── ModelError       weights or tokenizer that cannot be loaded
    ├── ResourceError    too few devices, or too little disk
    ├── ToolError        a service that a tool needs does not answer, or answers something else
    │   ├── ToolOutage   it stayed away too long in mid-run; exit status 4
    │   └── ToolRefused  it refuses what the run asks, or the run itself: no waiting helps
    ├── PluginError      the user's own reward or agent failed in mid-run; the run was saved
    ├── CollapseError    the collapse guard ended the run; exit status 3
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

import re
from collections.abc import Mapping, Sequence

URL_SECRETS = re.compile(
    r"(?<=://)[^/?#\s]+@|(?<=[?&])((?:api[_-]?)?key|(?:access_)?token)=[^&#\s'\"]+", re.I
)
"""What of an address is a secret: `user:password@`, and keys among its parameters."""


def redact(text: str) -> str:
    """A text for people and files, without the secrets of the addresses in it.

    Example: `redact("http://ann:pw@host/?key=1")` is `http://***@host/?key=***`.
    """
    return URL_SECRETS.sub(lambda found: f"{found[1]}=***" if found[1] else "***@", text)


class UserError(Exception):
    """Root of the tree; its message is for the user, and shows no password of an address."""

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(redact(message))


class ConfigError(UserError):
    """An option that is unknown, of the wrong type, or at odds with another."""


class AnswerInvalid(ConfigError):
    """A server that an option names answers, but not as it should."""


class DataError(UserError):
    """A file or row of questions that cannot be used."""


class ModelError(UserError):
    """Weights or tokenizer that cannot be loaded."""


class ResourceError(UserError):
    """Too few devices, or too little disk, for the settings."""


class ToolError(UserError):
    """A service that a tool needs does not answer, or answers something else."""

    def __init__(self, message: str, faults: Mapping[str, int] | None = None) -> None:
        """`faults`: what infrastructure did to the call, by names of `Tool.faults`."""
        super().__init__(message)
        self.faults = dict(faults or {})


class CollapseError(UserError):
    """The policy collapsed in mid-run; the message names the last healthy checkpoint."""

    exit_code = 3


class ToolOutage(ToolError):
    """A tool stayed away for longer than its `max_outage`; the run was saved."""

    exit_code = 4


class ToolRefused(ToolError):
    """A service that answers, but not this run: a wrong token, a wrong address, a limit."""


class PluginError(UserError):
    """The user's own reward or agent raised, or gave what it must not; the run was saved."""


class Interrupted(UserError):
    """The run was asked to stop, or its time is nearly over; it was saved and can go on.

    The exit status is EX_TEMPFAIL: the same command goes on with `trainer.resume_mode=auto`.
    """

    exit_code = 75


class SaveError(UserError):
    """A checkpoint that could not be written; the ones before it are as they were."""


class RankLost(UserError):
    """A training rank died, and with it what it held of the weights."""

    exit_code = 5


class ReplicaLost(UserError):
    """A rollout replica died and cannot be replaced, or no more."""

    exit_code = 5


class PreflightError(UserError):
    """All that stands in the way of a run, one problem a line."""

    def __init__(self, problems: Sequence[UserError]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"the run cannot start, {len(self.problems)} problem(s):\n{lines}")


def first_line(error: object) -> str:
    """The first line of an error's text; its kind where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def explain(subject: str, got: object, expected: str, fix: str) -> str:
    """The one-line wording of a user's mistake.

    Example: `explain("max_turns", "-1", "1 or more", "set max_turns=2")` is
    `max_turns: got -1, expected 1 or more; fix: set max_turns=2`.
    """
    return f"{subject}: got {got}, expected {expected}; fix: {fix}"
