"""What plays the dialogues of a run, and the server that its built-in tool asks."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.option import option


@dataclass
class AgentConfig:
    """What plays the dialogues of a run."""

    name: str = option("dialogue", resume="experiment", choices=("dialogue",), or_file=True)
    """`dialogue`, or `path/file.py:Name`: called with the options of the run, it gives an agent
    (`verl.agent.interface.Agent`)."""
    tools: list[str] = option(factory=lambda: ["search"], resume="experiment")
    """What the policy may call: names of built-in tools, or `path/file.py:Name` of your own
    (`verl.agent.interface.Tool`; docs/tools.md)."""


EMPTY_URL = "empty"
"""The url that stands for no documents at all."""


@dataclass
class ServerConfig:
    """The server that the built-in tool asks for documents."""

    url: str = option("http://127.0.0.1:8000/retrieve", resume="free")
    """Its address, or several with commas between them that stand in for each other;
    `empty` for no documents at all (a control)."""
    topk: int = option(3, resume="experiment", ge=1, le=10_000)
    """Documents per query."""
    timeout: float = option(60.0, resume="free", gt=0)
    """Seconds one request may take."""
    max_retries: int = option(8, resume="free", ge=0)
    """Further tries after a failed request, at another address or with growing pauses."""
    deadline: float | None = option(None, resume="free", gt=0)
    """Seconds one query may take with all its tries; null: as long as they last."""
    speculate: bool = option(False, resume="free")
    """Ask ahead, while the policy still writes, for what it is likely to ask, and do not ask again
    what another dialogue of the group asked. Dialogues stay the same to the last bit; a few
    requests are sent that nobody needs (docs/tools.md)."""
    max_outage: float = option(1800.0, resume="free", ge=0)
    """Seconds for which a training run waits for a server that went away; then it saves and stops
    with exit status 4, and the same command goes on with `trainer.resume_mode=auto`."""
