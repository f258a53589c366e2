"""What an agent is made of: tools, what they bring, and the format of the dialogue.

A policy turn goes through `DialogueFormat.parse` into tool calls or an answer; tools answer with
an `Observation`; the format words it. The loop over turns is `verl.agent.dialogue`.
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
    """A policy-environment loop; one call makes one trajectory."""

    async def run(self, start: Trajectory, engine: RolloutEngine, sampling: Sampling) -> Trajectory:
        """Continue `start` (which holds the prompt segment only) until it ends.

        `sampling.stop` and `sampling.max_tokens` are the agent's to set; temperature and top_p
        are the caller's. Infrastructure failures end in status FAILED, not in an exception.
        """
        ...


@dataclass(frozen=True)
class Item:
    """One piece of what a tool brings: a passage, a number, the output of a program."""

    text: str
    title: str | None = None
    id: str | None = None
    """By which the tool `visit`, or another, finds all of it."""
    source: object = None
    """What it was made of, for those who listen to a dialogue; the policy never sees it."""


@dataclass(frozen=True)
class Observation:
    """What a tool call brought: items, best first. The loop leaves out those that do not fit."""

    items: tuple[Item, ...] = ()
    faults: Mapping[str, int] = field(default_factory=dict)
    """What infrastructure did to this call, by names of `Tool.faults`."""


@dataclass(frozen=True)
class ToolCall:
    """A call that a policy asks for."""

    tool: str
    arguments: Mapping[str, Any] | str
    """By name; a text alone is the first required argument."""


@dataclass(frozen=True)
class Turn:
    """What a policy turn asks for: tool calls, or an answer, or neither (an invalid action)."""

    calls: tuple[ToolCall, ...] = ()
    answer: str | None = None
    is_malformed: bool = False
    """The turn breaks the format, whether or not it asks for something."""
    is_open: bool = False
    """It ran out of tokens, so that its mark of an end is missing."""


def text_arguments(**descriptions: str) -> dict[str, Any]:
    """JSON schema of arguments that are all texts and all required, each with its description."""
    properties = {name: {"type": "string", "description": d} for name, d in descriptions.items()}
    return {"type": "object", "properties": properties, "required": list(properties)}


class Tool:
    """Something that a policy may call. A subclass sets the attributes and writes `call`.

    A run builds each tool from its options, `Tool(config)`, in the driver and beside every engine.
    A mistake of the policy (a division by zero) is an observation that says so; only what a user
    must mend is a `ToolError`.
    """

    name: str
    """As the policy writes it: in a tag dialogue the name of its tag."""
    description: str = ""
    """What it does, for a policy that is told of its tools."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments of `call`; `text_arguments` writes that of texts."""
    counted_as: str = ""
    """The plural in metrics, `env/PLURAL` and `env/valid_PLURAL`; default: `NAME_calls`."""
    faults: tuple[str, ...] = ()
    """Names of what infrastructure may do to its calls, summed to the metrics `fault/NAME`."""
    shows_ids: bool = False
    """Its arguments are ids of items, which formats made of the tools' descriptions then show."""
    anticipates: bool = False
    """`anticipate` does something: turns are then listened to while they are sampled."""
    max_outage: float = 1800.0
    """Seconds for which a run waits while `probe` finds something wrong."""
    max_outage_option: str = "max_outage of the tool"
    """The option that sets it, for messages."""
    fix: str = "see that it answers"
    """What a user does about an outage, for messages."""

    def __init__(self, config: Any = None) -> None:
        """`config`: the options of the run (`verl.config.Config`), for tools that have some."""

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"tool {self.name}"

    @property
    def metric(self) -> str:
        """What its calls are counted under."""
        return self.counted_as or f"{self.name}_calls"

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates and OpenAI's API want it."""
        function = {
            "name": self.name, "description": self.description, "parameters": dict(self.parameters),
        }  # fmt: skip
        return {"type": "function", "function": function}

    @property
    def properties(self) -> Mapping[str, Any]:
        """Schemas of the arguments, by name."""
        found: Mapping[str, Any] = self.parameters.get("properties", {})
        return found

    @property
    def main_argument(self) -> str:
        """The argument that a text alone stands for: the first required one, or else the first.
        Raises ConfigError for a tool without arguments."""
        named = [*self.parameters.get("required", ()), *self.properties]
        if not named:
            expected = "one at least: what stands between the tags of a call is a text"
            fix = "give it one in `parameters`, or set template=native"
            raise ConfigError(explain(f"arguments of {self.label}", "none", expected, fix))
        return str(named[0])

    def for_dialogue(self, start: Trajectory) -> Tool:
        """What carries out one dialogue's calls: the tool itself, or one made for the dialogue."""
        return self

    def anticipate(self, **arguments: Any) -> None:
        """The policy may be about to make this call; only with `anticipates`, and never waited for.

        Whatever is done ahead may not change what `call` brings.
        """

    def ended(self) -> Mapping[str, float]:
        """Numbers for the statistics of the dialogue that is over."""
        return {}

    async def call(self, **arguments: Any) -> Observation:
        """Carry out one call. Raises ToolError where infrastructure fails for good, and ToolRefused
        where no call of this run would be carried out, which ends it."""
        raise NotImplementedError

    def probe(self, seconds: float) -> str:
        """What is wrong, or an empty text where it answers; takes at most `seconds`.

        Raises ToolRefused where it answers but refuses this run, which no waiting mends.
        """
        return ""

    def preflight(self, seconds: float) -> Iterator[ToolError]:
        """What stands in the way of a run that is to begin, one error for each thing to mend."""
        try:
            problem = self.probe(seconds)
        except ToolRefused as error:
            yield error
            return
        if problem:
            yield ToolError(f"{self.label}: {problem}; fix: {self.fix}")

    def identity(self) -> Mapping[str, str]:
        """Fingerprints of what it serves, kept with checkpoints; names are unique over all tools.

        Empty where it cannot tell.
        """
        return {}

    def settings(self) -> Mapping[str, Any]:
        """What is written beside an exported model, so that it may be asked as it was trained."""
        return {}

    async def aclose(self) -> None:
        """Close what was opened in this event loop."""


class DialogueFormat(Protocol):
    """How a dialogue is written: what the policy is told, and how its turns are read."""

    @property
    def name(self) -> str: ...

    @property
    def stop(self) -> tuple[str, ...]:
        """What ends a policy turn, besides the end of sequence."""
        ...

    @property
    def closed_think(self) -> str:
        """A thinking part that is over before the policy starts (`algorithm.no_think_rl`)."""
        ...

    @property
    def acts_in_think(self) -> bool:
        """Calls are part of the thinking, so that a closed one would leave no room for them."""
        ...

    @property
    def tags(self) -> Grammar:
        """What rewards read a dialogue's text by."""
        ...

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the chat template tells of in every prompt; empty where words do."""
        ...

    def user_prompt(self, question: str) -> str:
        """The user's message for one question."""
        ...

    def parse(self, completion: Completion) -> Turn:
        """What one policy turn asks for."""
        ...

    def begun(self, text: str) -> Sequence[ToolCall]:
        """Calls that a turn may hold whose text so far is this, for tools that anticipate.

        A call that is sure to be another one in the end is left out.
        """
        ...

    def respond(
        self, turn: Turn, found: Sequence[Sequence[Item]] | None, reserved: Sequence[str]
    ) -> str:
        """What the policy is told after a turn, up to where it takes over again.

        `found`: the items of each call, in their order; None where nothing was carried out, which
        the text then says. `reserved`: special tokens of the tokenizer, which no item may bring.
        """
        ...
