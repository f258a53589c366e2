"""The agent of a run, built from its options: format, tools and budgets of its dialogues."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from transformers import AutoTokenizer

from search_r1.agent.search import SearchTool, build_search
from search_r1.agent.tags import TEMPLATES
from search_r1.search.client import Retrieval
from verl import plugins
from verl.agent.dialogue import DialogueAgent, Limits, Tokenizer, refuse_closed_think
from verl.agent.environment import Environment
from verl.agent.interface import Agent, Tool
from verl.agent.tags import TagFormat, plain_format
from verl.config import Config
from verl.errors import ConfigError, explain

TOOLS: Mapping[str, Callable[[Config], Tool]] = {"search": build_search}
"""The tools that `agent.tools` may name; each row builds one from the options of a run."""

PLAIN = "tools"
"""The template whose words are made of the tools' descriptions."""


def build_agent(config: Config) -> Agent:
    """What `agent.name` names; actors of a run call this, each for itself."""
    return plugins.resolve("agent.name", config.agent.name, AGENTS)(config)


def build_dialogue(config: Config) -> DialogueAgent:
    """The loop of `verl.agent.dialogue` with the run's format, tools and tokenizer."""
    limits = Limits(
        max_turns=config.max_turns,
        max_response_length=config.data.max_response_length,
        max_obs_length=config.data.max_obs_length,
        max_prompt_length=config.data.max_prompt_length,
        no_think_rl=config.algorithm.no_think_rl,
    )
    tokenizer = AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path)
    return DialogueAgent(limits, build_format(config), build_environment(config), tokenizer)


AGENTS: Mapping[str, Callable[[Config], Agent]] = {"dialogue": build_dialogue}
"""The agents that `agent.name` may name."""


def build_environment(config: Config) -> Environment:
    """The tools of a run. Raises ConfigError for one that is not there."""
    tools = [plugins.resolve("agent.tools", name, TOOLS)(config) for name in config.agent.tools]
    return Environment(tuple(tools), enabled=config.do_search)


def build_format(config: Config) -> TagFormat:
    """The run's template for its tools.

    Raises ConfigError for one that is not there, or cannot work.
    """
    if config.template not in (*TEMPLATES, PLAIN):
        expected = f"one of {', '.join((*TEMPLATES, PLAIN))}"
        raise ConfigError(explain("template", config.template, expected, "name one"))
    tools = build_environment(config).tools
    found = plain_format(tools) if config.template == PLAIN else TEMPLATES[config.template]
    refuse_closed_think(found, config.algorithm.no_think_rl)
    return found.with_tools(tool.name for tool in tools)


def search_agent(
    retrieval: Retrieval,
    tokenizer: Tokenizer,
    limits: Limits | None = None,
    template: TagFormat = TEMPLATES["search_r1"],
    do_search: bool = True,
) -> DialogueAgent:
    """An agent that searches, without the options of a run."""
    environment = Environment((SearchTool(retrieval),), do_search)
    return DialogueAgent(limits or Limits(), template, environment, tokenizer)


def retrieval_of(environment: Environment) -> Retrieval | None:
    """What finds the documents of the tool `search`, if the environment has that tool."""
    tool = environment.find(SearchTool.name)
    return tool.retrieval if isinstance(tool, SearchTool) else None
