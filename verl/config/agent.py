"""Options of dialogues: the agent, its tools, and the document server of the built-in tool."""

from dataclasses import dataclass, field

from verl.config.option import option


@dataclass
class AgentConfig:
    """The agent and its tools."""

    name: str = option(
        "dialogue",
        resume="experiment",
        choices=(
            "dialogue", "documents_first", "folding", "openenv:URL", "verifiers:ADDRESS",
            "loop:FILE.py:NAME",
        ),
        or_file=True,
    )  # fmt: skip
    """The agent: `dialogue`; `documents_first`, which puts the documents for the question itself
    before the first turn; `folding`, which drops earlier documents when the context is full;
    `openenv:URL`, an OpenEnv environment; `verifiers:tcp://HOST:PORT`, one of verifiers;
    `loop:FILE.py:NAME`, a function that plays an episode with an OpenAI client (all:
    docs/guides/rewards.md); or `path/file.py:Name` of a callable that takes the options of the run
    and returns an agent (`verl.agent.interface.Agent`)."""
    tools: list[str] = option(factory=lambda: ["search"], resume="experiment", path="code")
    """Tools that the policy may call: names of built-in tools, or `path/file.py:Name` of a custom
    tool (`verl.agent.interface.Tool`; docs/guides/rewards.md)."""


EMPTY_URL = "empty"
"""Server address that means "no documents"."""


@dataclass
class ServerConfig:
    """The document server that the built-in tool queries."""

    url: str = option("http://127.0.0.1:8000/retrieve", resume="free")
    """Address of the document server, or several equivalent servers separated by commas; `empty`
    returns no documents at all (a control experiment)."""
    topk: int = option(3, resume="experiment", ge=1, le=10_000)
    """Documents returned per query."""
    timeout: float = option(60.0, resume="free", gt=0)
    """Timeout of one request, in seconds."""
    max_retries: int = option(8, resume="free", ge=0)
    """Retries after a failed request, at another address or after growing pauses."""
    deadline: float | None = option(None, resume="free", gt=0)
    """Time limit of one query including all retries, in seconds; null sets no limit."""
    max_outage: float = option(1800.0, resume="free", ge=0)
    """Seconds that a training run waits for an unavailable server; it then saves and stops with
    exit status 4."""


@dataclass
class DialogueOptions:
    """What shapes a dialogue besides its lengths, in training, evaluation and use.

    They have no section of their own: users know them by these names.
    """

    agent: AgentConfig = field(default_factory=AgentConfig)
    retriever: ServerConfig = field(default_factory=ServerConfig)
    max_turns: int = option(2, resume="experiment", ge=0, le=10_000)
    """Maximum turns of a trajectory that may call tools; one last turn without tools follows."""
    do_search: bool = option(True, resume="experiment")
    """Use the tools; false runs without them and their servers, and a call is an invalid action."""
    template: str = option("search_r1", resume="experiment", path="template")
    """Wording of prompts and observations: a template of docs/guides/rewards.md, or `tools`,
    which builds it from the descriptions of the tools."""

    @property
    def calls_tools(self) -> bool:
        """Whether dialogues call tools, so that a run depends on their servers."""
        return self.do_search and self.max_turns > 0
