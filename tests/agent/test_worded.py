"""Prompts in another wording than the template's are noticed, and only those."""

import pytest

from search_r1.agent.generation import build_environment, build_format
from search_r1.agent.tags import TEMPLATES
from search_r1.agent.worded import warn_of_other_wording
from tests.core.agent.chat_templates import ChatTokenizer
from verl.config import Config
from verl.types import Prompt

QUESTION = "Who wrote <Faust> {in} 1808"


def prompt(text: str, **extra: str) -> Prompt:
    """Return a prompt as a chat template writes it."""
    return Prompt("f#0", (1,), "nq", ("x",), extra, f"<|im_start|>user\n{text}<|im_end|>\n<think>")


@pytest.mark.parametrize("name", [*TEMPLATES, "native", "tools"])
def test_only_another_wording_counts(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The template's own prompts pass; a changed sentence does not; no question, no verdict."""
    config = Config(template=name)
    format = build_format(config, build_environment(config), ChatTokenizer())
    own = prompt(format.user_prompt(f" {QUESTION}? "), question=f"{QUESTION}?")
    assert warn_of_other_wording(format, [own, prompt("Tell me something.")]) == 0
    assert not caplog.records
    other = prompt(f"Use the tools. Question: {QUESTION}?\nGo", question=f"{QUESTION}?")
    is_bare = format.user_prompt("?") == "?"  # a template that adds nothing to a question
    assert warn_of_other_wording(format, [own, other, other]) == (0 if is_bare else 2)
    assert bool(caplog.records) != is_bare
