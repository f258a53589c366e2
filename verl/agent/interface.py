"""The interfaces of an agent: tools, their observations, and the format of the dialogue.

`DialogueFormat.parse` reads tool calls or an answer from a policy turn, tools return an
`Observation`, and the format turns it into text. The loop over turns is in `verl.agent.dialogue`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl.agent.grammar import Grammar
from verl.engine import RolloutEngine
from verl.errors import ConfigError, ToolError, ToolRefused, explain
from verl.types import Completion, Sampling, Trajectory


class Agent(Protocol):
    """A loop of policy and environment; one call of `run` produces one trajectory."""

    async def run(self, start: Trajectory, engine: RolloutEngine, sampling: Sampling) -> Trajectory:
        """Continue `start`, which contains only the prompt segment, until the dialogue ends.

        The agent sets `sampling.stop` and `sampling.max_tokens`; the caller sets temperature and
        top_p. An infrastructure failure results in status FAILED, not in an exception. What the
        policy did not sample is an observation; a prompt after a segment of the policy's begins a
        row that sees nothing before it (`Trajectory.row_starts`).
        """


@dataclass(frozen=True)
class Item:
    """One result of a tool: a passage, a number, the output of a program."""

    text: str
    title: str | None = None
    id: str | None = None
    """Identifies the whole document for tools such as `visit`."""
    source: object = None
    """The original object, for listeners of a dialogue; the policy never sees it."""


@dataclass(frozen=True)
class Observation:
    """The result of a tool call: items, best first. Items that do not fit are left out later."""

    items: tuple[Item, ...] = ()
    faults: Mapping[str, int] = field(default_factory=dict)
    """Counts of infrastructure faults of this call, by the names in `Tool.faults`."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call requested by the policy."""

    tool: str
    arguments: Mapping[str, Any] | str
    """Arguments by name; a plain text is the tool's main argument."""


@dataclass(frozen=True)
class Turn:
    """The content of a policy turn: tool calls, an answer, or neither (an invalid action)."""

    calls: tuple[ToolCall, ...] = ()
    answer: str | None = None
    is_malformed: bool = False
    """Whether the turn violates the format; it may contain calls or an answer all the same."""
    is_open: bool = False
    """Whether the end-of-turn token is missing because the turn ran out of tokens."""


def text_arguments(**descriptions: str) -> dict[str, Any]:
    """Return a JSON schema of required text arguments with the given descriptions."""
    properties = {name: {"type": "string", "description": d} for name, d in descriptions.items()}
    return {"type": "object", "properties": properties, "required": list(properties)}


class Tool:
    """A tool that the policy may call. A subclass sets the attributes and implements `call`.

    A run builds each tool as `Tool(config)`, in the driver and in every replica. For a mistake of
    the policy (such as a division by zero), `call` returns an observation that describes it; only
    failures that a user must fix raise `ToolError`.
    """

    name: str
    """The name that the policy writes; in a tag dialogue the name of the tag."""
    description: str = ""
    """What the tool does, as described to the policy."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments of `call`; see `text_arguments` for plain texts."""
    counted_as: str = ""
    """The plural in the metrics `env/PLURAL` and `env/valid_PLURAL`; default: `NAME_calls`."""
    faults: tuple[str, ...] = ()
    """Names of infrastructure faults of calls, summed into the metrics `fault/NAME`."""
    shows_ids: bool = False
    """Whether arguments are ids of items; generated formats then show the ids."""
    max_outage: float = 1800.0
    """Maximum seconds that a run waits while `probe` reports a problem."""
    max_outage_option: str = "max_outage of the tool"
    """Name of the option that sets `max_outage`, for messages."""
    fix: str = "make sure that it answers"
    """What a user can do about an outage, for messages."""

    def __init__(self, config: Any = None) -> None:
        """`config`: the options of the run (`verl.config.Config`)."""

    @property
    def label(self) -> str:
        """The tool's name in messages."""
        return f"tool {self.name}"

    @property
    def metric(self) -> str:
        """The name under which calls are counted."""
        return self.counted_as or f"{self.name}_calls"

    @property
    def schema(self) -> dict[str, Any]:
        """The tool's schema in the form of chat templates and OpenAI's API."""
        function = {
            "name": self.name, "description": self.description, "parameters": dict(self.parameters),
        }  # fmt: skip
        return {"type": "function", "function": function}

    @property
    def properties(self) -> Mapping[str, Any]:
        """Schemas of the arguments, by name."""
        properties: Mapping[str, Any] = self.parameters.get("properties", {})
        return properties

    @property
    def main_argument(self) -> str:
        """The argument that a plain text is passed as: the first required one, or the first.

        Raises ConfigError for a tool without arguments.
        """
        names = [*self.parameters.get("required", ()), *self.properties]
        if not names:
            expected = "at least one: the text between the tags of a call"
            fix = "add one to `parameters`, or set template=native"
            raise ConfigError(explain(f"arguments of {self.label}", "none", expected, fix))
        return str(names[0])

    def for_dialogue(self, start: Trajectory) -> Tool:
        """Return the tool for one dialogue: the tool itself, or an instance for the dialogue."""
        return self

    def ended(self) -> Mapping[str, float]:
        """Return numbers for the statistics of the dialogue that has ended."""
        return {}

    async def call(self, **arguments: Any) -> Observation:
        """Execute one call.

        Raises ToolError if infrastructure fails permanently, and ToolRefused, which ends the run,
        if no call of this run can succeed.
        """
        raise NotImplementedError

    def probe(self, seconds: float) -> str:
        """Return the problem that makes the tool unavailable, or an empty text if it answers.

        Takes at most `seconds`. Raises ToolRefused if the tool answers but refuses this run, so
        that waiting cannot help.
        """
        return ""

    def preflight(self, seconds: float) -> Iterator[ToolError]:
        """Yield the problems that must be fixed before a run can start."""
        try:
            problem = self.probe(seconds)
        except ToolRefused as error:
            yield error
            return
        if problem:
            yield ToolError(f"{self.label}: {problem}; fix: {self.fix}")

    def identity(self) -> Mapping[str, str]:
        """Return fingerprints of the content that the tool serves; empty if it cannot tell.

        They are stored with checkpoints. Names must be unique over all tools.
        """
        return {}

    def settings(self) -> Mapping[str, Any]:
        """Return settings to store with an exported model, so that it is used as it was trained."""
        return {}

    async def aclose(self) -> None:
        """Close resources that were opened in this event loop."""


class DialogueFormat(Protocol):
    """How a dialogue is written: the texts for the policy, and how its turns are parsed."""

    @property
    def name(self) -> str: ...

    @property
    def stop(self) -> tuple[str, ...]:
        """The strings that end a policy turn, in addition to the end of sequence."""

    @property
    def closed_think(self) -> str:
        """A closed thinking part, put before each policy turn (`algorithm.no_think_rl`)."""

    @property
    def acts_in_think(self) -> bool:
        """Whether calls are made inside the thinking part, which then must not be closed."""

    @property
    def tags(self) -> Grammar:
        """The tags with which rewards parse a dialogue's text."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """Tool schemas for the chat template; empty if the instruction describes the tools."""

    def user_prompt(self, question: str) -> str:
        """Return the user's message for a question."""

    def parse(self, completion: Completion) -> Turn:
        """Parse one policy turn."""

    def respond(
        self, turn: Turn, results: Sequence[Sequence[Item]] | None, reserved: Sequence[str]
    ) -> str:
        """Return the text after a policy turn, up to where the policy continues.

        `results`: the items of each call, in order; None if no call was executed, which the text
        then explains. `reserved`: control tokens of the tokenizer, which are neutralized in items.
        """
