"""Starts an agent from options: checks the retriever, loads the model, starts the engine.

The retriever is contacted first, so that a wrong address fails before long work. The agent is the
same as in a training run with these options.
"""

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from search_r1.inference.agent_options import DOCUMENTS, SETTINGS_FILE, TURNS, AgentOptions
from search_r1.inference.dialogue import AgentSession
from search_r1.inference.model import (
    at_latest_checkpoint,
    checked_agent,
    open_model_folder,
    running_engine,
)
from search_r1.retrieval.client import RetrievalClient, read_urls
from search_r1.retrieval.errors import RetrieverRefused, RetrieverUnavailable
from verl import plugins
from verl.agent.wording import TEMPLATE_FILE
from verl.config import Config
from verl.config.agent import EMPTY_URL
from verl.errors import ConfigError, ModelError, ToolError, explain, misspelt
from verl.json_files import read_object
from verl.model_files import ModelProblem, model_errors
from verl.remote_code import set_trust
from verl.types import Sampling

Facts = Mapping[str, Any]

NO_RETRIEVER: Facts = {"retriever": "none"}
"""Facts for a method that uses no retriever."""
EMPTY_RETRIEVER: Facts = {"retriever": "empty"}
"""Facts for `--retriever-url empty` and for a server that never finds anything."""
SERVER_KEYS = ("limits", "default_topk", "memory")
"""Keys of `/info` that do not affect any answer."""
CONTROLS = ("none", "empty", "random", "oracle")
"""Control retrievers, used for diagnostics instead of a real search."""


async def retriever_facts(url: str) -> Facts:
    """Fetch `/info` of a `retriever.url`; all its addresses must agree. Raises ToolError."""
    if url == EMPTY_URL:
        return EMPTY_RETRIEVER
    if url.startswith(plugins.PYTHON_PREFIX):
        return {"retriever": url}
    try:
        clients = {address: RetrievalClient(address, max_retries=1) for address in read_urls(url)}
    except ValueError as error:
        fix = "correct it, or use no retriever: --retriever-url empty"
        raise ConfigError(f"--retriever-url: {error}; fix: {fix}") from error
    facts = {address: await _server_facts(address, client) for address, client in clients.items()}
    first = next(iter(facts.values()))
    for address, other in facts.items():
        if other != first:
            fix = "give addresses of servers with the same corpus and index"
            raise ToolError(explain(f"retriever {address}", other, f"the same as {first}", fix))
    return first


async def _server_facts(url: str, client: RetrievalClient) -> Facts:
    try:
        info = await client.info()
    except RetrieverRefused as error:
        if error.status in (401, 403):
            fix = "set RETRIEVER_TOKEN to the server's token"
            raise ToolError(explain(f"retriever {url}", str(error), "access", fix)) from error
        return {"retriever": "unknown", "address": url}  # other implementations have no /info
    except RetrieverUnavailable as error:
        fix = "bash retrieval_launch.sh, or --retriever-url URL, or --retriever-url empty"
        raise ToolError(explain("retriever", str(error), "a search server", fix)) from error
    finally:
        await client.aclose()
    return {name: value for name, value in info.items() if name not in SERVER_KEYS}


SETTING_TYPES = {
    "template": str, "tools": list, "max_turns": int, "topk": int, "chat_template_kwargs": dict,
}  # fmt: skip
"""Keys of `search_r1.json` and the types of their values."""
BOUNDS = {"max_turns": TURNS, "topk": DOCUMENTS}


def run_config(options: AgentOptions, model: str) -> Config:
    """Build a run's configuration; options that are not set come from the model's settings.

    `model` is the folder of the weights; training writes its settings, `search_r1.json`.
    """
    config = Config()
    saved = _read_settings(model)
    config.actor_rollout_ref.model.path = model
    config.actor_rollout_ref.model.trust_remote_code = options.trust_remote_code
    template = saved.get("template")
    if template == TEMPLATE_FILE:
        template = str(Path(model) / TEMPLATE_FILE)
    config.template = _first(options.template, template, config.template)
    code = [tool for tool in saved.get("tools") or () if ".py" in tool]
    if code and options.tools is None and not options.trust_remote_code:
        got, expected = f"the tool {code[0]}, which is code", "built-in tools"
        fix = "--trust-remote-code, once you have read it"
        raise ModelError(explain(f"{SETTINGS_FILE} of {model}", got, expected, fix))
    config.agent.tools = list(_first(options.tools, saved.get("tools") or None, config.agent.tools))
    config.data.chat_template_kwargs = _first(
        options.chat_template_kwargs, saved.get("chat_template_kwargs"), {}
    )
    config.max_turns = _first(options.max_turns, saved.get("max_turns"), config.max_turns)
    config.retriever.topk = _first(options.topk, saved.get("topk"), config.retriever.topk)
    config.retriever.url = options.retriever_url
    for name in ("max_start_length", "max_prompt_length", "max_response_length", "max_obs_length"):
        setattr(config.data, name, getattr(options, name))
    config.trainer.device = options.device
    config.trainer.seed = options.seed or 0
    rollout = config.actor_rollout_ref.rollout
    rollout.name = "remote" if options.endpoint else options.engine
    rollout.url = options.endpoint
    served = options.served_model or options.model
    rollout.server = {"served_model": served, "api_key_env": options.api_key_env}
    rollout.dtype = options.dtype
    rollout.max_num_seqs = options.concurrency
    rollout.tensor_model_parallel_size = options.tensor_parallel_size
    rollout.gpu_memory_utilization = options.gpu_memory_utilization
    return config


def _read_settings(model: str) -> dict[str, Any]:
    """Read and check `search_r1.json` of a model's folder; empty if there is none."""
    file = Path(model) / SETTINGS_FILE
    if not file.is_file():
        return {}
    with model_errors(model, SETTINGS_FILE, "--model", "what training writes"):
        settings = read_object(file)
        _check_names(settings)
        for name, kind in SETTING_TYPES.items():
            value, bounds = settings.get(name), BOUNDS.get(name)
            is_kind = type(value) is kind  # not `isinstance`, which accepts a bool as an int
            if value is not None and (not is_kind or (bounds and value not in bounds)):
                raise ModelProblem(f"{name}={value!r}")
        if not all(isinstance(tool, str) for tool in settings.get("tools") or ()):
            raise ModelProblem(f"tools={settings['tools']!r}")
        return settings


def _check_names(settings: Mapping[str, Any]) -> None:
    """Raise ModelProblem for a key that has no effect, unless a user's tool may have stored it.

    A name that is almost that of a setting is never a tool's.
    """
    tools = settings.get("tools")
    has_own_tools = isinstance(tools, list) and any(":" in str(tool) for tool in tools)
    for name in settings.keys() - SETTING_TYPES.keys():
        fix = misspelt(name, SETTING_TYPES)
        if fix or not has_own_tools:
            known = ", ".join(SETTING_TYPES)
            raise ModelProblem(f"unknown key {name}; {fix or f'expected some of {known}'}")


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


MAX_RETRIES = 2
"""Retries of a search; few, since a person is waiting."""


@contextlib.asynccontextmanager
async def open_session(options: AgentOptions) -> AsyncIterator[AgentSession]:
    """Start the agent and its engine, after checking the retriever. Raises UserError."""
    await retriever_facts(options.retriever_url)
    set_trust(options.trust_remote_code)
    if not options.model:
        from search_r1.inference.default_model import with_default_model  # noqa: PLC0415 by option

        options = with_default_model(options)
    options = at_latest_checkpoint(options)
    with open_model_folder(options) as folder:
        config = run_config(options, str(folder))
        config.retriever.max_retries = MAX_RETRIES
        agent = checked_agent(config)
        tokenizer: Any = agent.tokenizer
        sampling = Sampling(options.max_response_length, options.temperature, options.top_p)
        try:
            async with running_engine(config) as engine:
                longest = min(options.max_start_length, options.max_prompt_length)
                yield AgentSession(agent, engine, tokenizer, sampling, options.seed, longest,
                                   options.num_at_once)  # fmt: skip
        finally:
            await agent.environment.aclose()
