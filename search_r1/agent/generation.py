"""Builds a run's agent from its options: dialogue format, tools and token budgets."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from search_r1.agent.retriever import build_search
from search_r1.agent.search import SearchTool
from search_r1.agent.tags import PLAIN, TEMPLATES, named_format
from search_r1.retrieval.protocol import Retrieval
from verl import plugins
from verl.agent import native
from verl.agent.dialogue import DialogueAgent, Limits, Tokenizer, refuse_closed_think
from verl.agent.environment import Environment
from verl.agent.interface import Agent, DialogueFormat, Tool
from verl.agent.native import ChatTokenizer, NativeFormat
from verl.agent.schema import check_parameters
from verl.agent.tags import TagFormat, plain_format
from verl.config import Config
from verl.errors import ConfigError, DataError, explain
from verl.types import Prompt


def build_visit(config: Config) -> Tool:
    """Build the tool `visit`, which few runs use."""
    from search_r1.agent import visit  # noqa: PLC0415 by option

    return visit.build_visit(config)


TOOLS: Mapping[str, Callable[[Config], Tool]] = {"search": build_search, "visit": build_visit}
"""Built-in tools for `agent.tools`, as functions of a run's options."""
REMOVED_TOOLS: Mapping[str, str] = {
    "python": "a tool that exists: python, whose programs could leave their confinement, is gone"
}
"""Former tools: what was expected instead, and why they are gone."""


def build_agent(config: Config) -> Agent:
    """Build the agent that `agent.name` names; each Ray actor of a run calls this for itself."""
    name = agent_kind(config.agent.name)
    agent: Agent = plugins.build("agent.name", name, AGENTS, config, needs="run")
    return agent


def build_dialogue(config: Config) -> DialogueAgent:
    """Build the loop of `verl.agent.dialogue` with the run's format, tools and tokenizer."""
    from verl.model_files import load_tokenizer  # noqa: PLC0415 - transformers: seconds

    limits = Limits(
        max_turns=config.max_turns,
        max_response_length=config.data.max_response_length,
        max_obs_length=config.data.max_obs_length,
        max_prompt_length=config.data.max_prompt_length,
        no_think_rl=config.algorithm.no_think_rl,
    )
    tokenizer = load_tokenizer(
        config.actor_rollout_ref.model.path, template_kwargs=config.data.chat_template_kwargs
    )
    environment = build_environment(config)
    format = build_format(config, environment, tokenizer)
    return DialogueAgent(limits, format, environment, tokenizer)


VARIANTS: Mapping[str, str] = {
    "documents_first": "search_r1.agent.documents_first:DocumentsFirst",
    "folding": "search_r1.agent.folding:Folding",
}
"""Classes of the same loop with a difference, by path; either may be deleted."""


def build_variant(config: Config) -> DialogueAgent:
    """Build the loop as a class of `VARIANTS`. Raises ConfigError for options it cannot have."""
    name = config.agent.name
    variant = plugins.required("agent.name", name, VARIANTS[name])
    agent: DialogueAgent = variant.over(build_dialogue(config), config)
    return agent


OPTIONAL_AGENTS: Mapping[str, str] = {
    "openenv:URL": "search_r1.environments.openenv",
    "loop:FILE.py:NAME": "search_r1.gateway.agent",
    "verifiers:ADDRESS": "search_r1.gateway.verifiers",
}
"""Agents with an environment of their own, by the modules that build both; any may be deleted."""


def optional_agent(config: Config) -> ModuleType | None:
    """Import the module of a run's optional agent, if it has one. Raises ConfigError without it."""
    module = OPTIONAL_AGENTS.get(agent_kind(name := config.agent.name))
    return None if module is None else plugins.required("agent.name", name, module)


def build_optional(config: Config) -> Agent:
    """Build an agent of `OPTIONAL_AGENTS`."""
    module = optional_agent(config)
    assert module is not None, "only names of optional agents come here"
    agent: Agent = module.build_agent(config)
    return agent


AGENTS: Mapping[str, Callable[[Config], Any]] = {
    "dialogue": build_dialogue,
    **dict.fromkeys(VARIANTS, build_variant),
    **dict.fromkeys(OPTIONAL_AGENTS, build_optional),
}
"""Built-in agents for `agent.name`, as functions of a run's options."""


def agent_kind(name: str) -> str:
    """Return the key of `AGENTS` that a name is of, such as `openenv:URL`, or the name itself."""
    served = (key for key in AGENTS if ":" in key and name.startswith(key.partition(":")[0] + ":"))
    return next(served, name)


def build_environment(config: Config) -> Environment:
    """Build the tools of a run. Raises ConfigError for tools unknown, removed or repeated."""
    if (module := optional_agent(config)) is not None:
        environment: Environment = module.build_environment(config)
        return environment
    for name in config.agent.tools:
        if name in REMOVED_TOOLS:
            fix = "name example/tools/sandbox.py:Sandbox (docs/guides/rewards.md), or leave it out"
            raise ConfigError(explain("agent.tools", name, REMOVED_TOOLS[name], fix))
    tools = [build_tool(name, config) for name in config.agent.tools]
    for tool in tools:
        check_parameters(tool)
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise ConfigError(explain("agent.tools", names, "each tool once", "remove the duplicates"))
    return Environment(tuple(tools), enabled=config.do_search)


def build_tool(name: str, config: Config) -> Tool:
    """Build a tool of `agent.tools`; a plain function with a docstring is one as well."""
    if plugins.is_path(name):
        from search_r1.agent.functions import FunctionTool, is_plain  # noqa: PLC0415 by option

        function: Any = plugins.resolve("agent.tools", name, {})
        if is_plain(function):
            return FunctionTool(function)
    tool: Tool = plugins.build("agent.tools", name, TOOLS, config, "label")
    return tool


def build_format(
    config: Config, environment: Environment, tokenizer: ChatTokenizer
) -> DialogueFormat:
    """Build the run's dialogue format. Raises ConfigError if it cannot work with the options."""
    tools = environment.tools
    is_native = config.template == native.NAME
    format = NativeFormat(tokenizer, tools) if is_native else build_tag_format(config, tools)
    refuse_closed_think(format, config.algorithm.no_think_rl)
    if isinstance(format, NativeFormat) and not format.marks_results:
        from search_r1.scoring_options import refuse_form_rewards  # noqa: PLC0415 by option

        refuse_form_rewards(config.reward_model)
    if not is_native:
        for tool in tools:
            _ = tool.main_argument  # raises ConfigError if the tool has no arguments
    return format


def build_tag_format(config: Config, tools: Sequence[Tool]) -> TagFormat:
    """Build the wording and tags of the run's template without a tokenizer, as rewards read it."""
    if config.template == native.NAME:
        return native.WORDING
    format = plain_format(tools) if config.template == PLAIN else named_format(config.template)
    return format.with_tools(tool.name for tool in tools)


def check_prompts(
    format: DialogueFormat, prompts: Iterable[Prompt], agent: str = "dialogue"
) -> None:
    """Refuse prompts with the call tags of another format, or that `agent` cannot use (DataError).

    Warns of prompts in another wording.
    """
    prompts = list(prompts)
    is_loop = agent.startswith(("loop:", "verifiers:"))  # whose messages are its own
    if agent == "documents_first" or is_loop:
        from search_r1.agent.documents_first import known_question  # noqa: PLC0415 by option

        for prompt in prompts:
            known_question(prompt, agent)
    if is_loop:
        return
    own = [tag.opening for tag in format.tags.calls] if not format.schemas else []
    others = {
        tag.opening: f"template={template.name}"
        for template in reversed(TEMPLATES.values())  # templates may share tags: the first one wins
        for tag in template.tags.calls
        if tag.opening not in own
    }
    if not format.schemas:  # as in veRL's own files, with a query in the place of JSON
        described = "template=FILE.yaml, which describes its tags (docs/guides/rewards.md)"
        others.setdefault(native.CALL.opening, described)
    for prompt in prompts:
        if any(opening in prompt.text for opening in own):
            continue
        for opening, other in others.items():
            if opening in prompt.text:
                got = f"a prompt that mentions {opening}"
                expected = f"the wording of template {format.name!r}"
                fix = (
                    f"set {other}, or build the data with --template_type {format.name} "
                    "(docs/guides/data.md)"
                )
                raise DataError(explain(prompt.uid, got, expected, fix))
    from search_r1.agent.worded import warn_of_other_wording  # noqa: PLC0415 - a check beside

    warn_of_other_wording(format, prompts)


def search_agent(
    retrieval: Retrieval,
    tokenizer: Tokenizer,
    limits: Limits | None = None,
    template: TagFormat = TEMPLATES["search_r1"],
    do_search: bool = True,
) -> DialogueAgent:
    """Build an agent with the search tool directly, without a run's options."""
    environment = Environment((SearchTool(retrieval),), do_search)
    return DialogueAgent(limits or Limits(), template, environment, tokenizer)


def find_retrieval(environment: Environment) -> Retrieval | None:
    """Return the retrieval of the environment's `search` tool, or None if it has no such tool."""
    tool = environment.find(SearchTool.name)
    return tool.retrieval if isinstance(tool, SearchTool) else None
