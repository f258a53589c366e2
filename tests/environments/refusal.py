"""What a run does with an agent whose server is none."""

import time

import pytest

from search_r1.agent.generation import build_environment
from verl.config import Config
from verl.errors import ConfigError


def check_refusal(agent: str) -> None:
    """The error comes within two seconds, and names the option, what it expects, and a fix."""
    config = Config()
    config.agent.name = agent
    kind = agent.partition(":")[0]
    began = time.monotonic()
    with pytest.raises(ConfigError, match=rf"^agent.name: got {kind}:.*expected .*; fix: "):
        build_environment(config)
    assert time.monotonic() - began < 2
