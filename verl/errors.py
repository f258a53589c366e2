"""Exceptions whose message is for the user, as opposed to bugs; base classes for tools and servers.

    UserError
    ├── ConfigError      an option is unknown, has the wrong type, or conflicts with another
    │   └── AnswerInvalid  a server named by an option sends an invalid response
    ├── DataError        a file or row of questions cannot be used
    │   └── PromptTooLong  a prompt has more tokens than are allowed
    ├── ModelError       weights or tokenizer cannot be loaded
    ├── ResourceError    there are too few devices, or too little disk space
    ├── ToolError        a service that a tool needs does not respond, or responds wrongly
    │   ├── ToolOutage   it was unavailable for too long during a run; exit status 4
    │   └── ToolRefused  it refuses the run or its requests, so that waiting does not help
    ├── PluginError      the user's own reward or agent failed during a run, which was saved
    ├── CollapseError    the collapse guard ended the run; exit status 3
    ├── MismatchError    engines and trainer compute different log-probs; exit status 3
    ├── Interrupted      the run was asked to stop or ran out of time, and saved; exit status 75
    ├── SaveError        a checkpoint could not be written, twice in a row or at the end
    ├── RankLost         a training rank died; the run continues from its last checkpoint, or ends
    │                    after `trainer.max_restarts` restarts; exit status 5
    ├── ReplicaLost      a rollout replica died and cannot be replaced; exit status 5
    └── PreflightError   several of the above, found together before the run starts

Commands print the message and exit with `exit_code`; any other exception is a bug and keeps its
traceback. Messages say what was got, what was expected, and the fix.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

URL_SECRETS = re.compile(
    r"(?<=://)[^/?#\s]+@|(?<=[?&])((?:api[_-]?)?key|(?:access_)?token)=[^&#\s'\"]+", re.I
)
"""Matches the secrets in a URL: `user:password@`, and keys among its parameters."""
MAX_GOT = 500
"""Longest quotation of what was got in a message, in characters."""


def redact(text: str) -> str:
    """Return the text with the secrets of all URLs in it replaced by `***`.

    Example: `redact("http://ann:pw@host/?key=1")` is `http://***@host/?key=***`.
    """
    return URL_SECRETS.sub(lambda match: f"{match[1]}=***" if match[1] else "***@", text)


class UserError(Exception):
    """Base class of errors for the user. Secrets of URLs are removed from the message."""

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(redact(message))


class ConfigError(UserError):
    """An option is unknown, has the wrong type, or conflicts with another."""


class AnswerInvalid(ConfigError):
    """A server named by an option sends an invalid response."""


class DataError(UserError):
    """A file or row of questions cannot be used."""


class PromptTooLong(DataError):
    """A prompt has more tokens than are allowed; a shorter one would be answered."""


class ModelError(UserError):
    """Weights or tokenizer cannot be loaded."""


class ResourceError(UserError):
    """There are too few devices, or too little disk space, for the settings."""


class ToolError(UserError):
    """A service that a tool needs does not respond, or responds wrongly."""

    def __init__(self, message: str, faults: Mapping[str, int] | None = None) -> None:
        """`faults`: counts of the call's infrastructure faults, by the names in `Tool.faults`."""
        super().__init__(message)
        self.faults = dict(faults or {})


class CollapseError(UserError):
    """The policy collapsed during the run; the message names the last healthy checkpoint."""

    exit_code = 3


class MismatchError(UserError):
    """Engines and trainer disagree: an engine has other weights, or computes another model."""

    exit_code = 3


class ToolOutage(ToolError):
    """A tool was unavailable for longer than its `max_outage`; the run was saved."""

    exit_code = 4


class ToolRefused(ToolError):
    """A service responds but refuses the run: a wrong token, a wrong address, a limit."""


class PluginError(UserError):
    """The user's own reward or agent raised, or returned something invalid; the run was saved."""


class Interrupted(UserError):
    """The run was asked to stop or is nearly out of time; it was saved and can be resumed."""

    exit_code = 75  # EX_TEMPFAIL


class SaveError(UserError):
    """A checkpoint could not be written; earlier checkpoints are intact."""


class RankLost(UserError):
    """A training rank died, and with it its shard of the weights."""

    exit_code = 5


class ReplicaLost(UserError):
    """A rollout replica died and cannot be replaced, or not again."""

    exit_code = 5


class PreflightError(UserError):
    """All problems that prevent a run from starting, one per line."""

    def __init__(self, problems: Sequence[UserError]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"the run cannot start, {len(self.problems)} problem(s):\n{lines}")


def first_line(error: object) -> str:
    """Return the first line of an error's message, or its class name if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def shortened(text: object, max_chars: int) -> str:
    """Return the text of an object; of a longer one the beginning, with an ellipsis."""
    text = str(text)
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def explain(subject: str, got: object, expected: str, fix: str) -> str:
    """Format the message of a user's mistake in one line; a long `got` is cut.

    Example: `explain("max_turns", "-1", "1 or more", "set max_turns=2")` is
    `max_turns: got -1, expected 1 or more; fix: set max_turns=2`.
    """
    return f"{subject}: got {shortened(got, MAX_GOT)}, expected {expected}; fix: {fix}"


NEAR = 0.75
"""Similarity (0 to 1, as in `difflib`) from which an unknown name is taken for a misspelt one."""


def misspelt(name: str, known: Iterable[str]) -> str:
    """Return the fix for a name that is nearly a known one; empty for one with its own meaning."""
    return did_you_mean(name, known, "", NEAR)


def did_you_mean(name: str, known: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """Return a fix for an unknown name: the most similar known one, or `otherwise`.

    `otherwise` is returned if the similarity (0 to 1, as in `difflib`) is below `cutoff`.
    """
    similar = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {similar[0]}?" if similar else otherwise
