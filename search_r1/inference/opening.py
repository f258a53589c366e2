"""From options to an agent that can be asked: model, retriever and engine, opened and closed.

The retriever is reached before long work, and known by what it says of itself; the agent is that of
a training run with these options.
"""

import contextlib
import importlib
import json
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

from search_r1.inference.dialogue import AgentSession
from search_r1.inference.model import (
    Options,
    at_latest_checkpoint,
    base_model_of,
    folder_of,
    load_agent,
    running_engine,
)
from search_r1.inference.options import DOCUMENTS, SETTINGS_FILE, TURNS, AgentOptions
from search_r1.search.client import RetrievalClient
from search_r1.search.errors import RetrieverRefused, RetrieverUnavailable
from search_r1.search.transport import read_urls
from verl import plugins
from verl.agent.wording import TEMPLATE_FILE
from verl.config import Config
from verl.config.agent import EMPTY_URL
from verl.errors import ConfigError, ModelError, ToolError, explain
from verl.model_files import ModelProblem, model_errors
from verl.remote_code import set_trust
from verl.types import Sampling

Facts = Mapping[str, Any]

NO_RETRIEVER: Facts = {"retriever": "none"}
"""Of a method that asks none."""
NOTHING_FOUND: Facts = {"retriever": "empty"}
"""Of `--retriever-url empty`, and of a server that finds nothing."""
ALLOWANCES = ("limits", "default_topk")
"""What a server says of itself that decides no answer."""
CONTROLS = ("none", "empty", "random", "oracle")
"""Retrievers whose documents are known beforehand: diagnostics, not search."""


async def facts_of(config: Config) -> Facts:
    """What answers the searches, as `/info` tells; alike for all addresses. Raises ToolError."""
    if config.retriever.url == EMPTY_URL:
        return NOTHING_FOUND
    if config.retriever.url.startswith(plugins.PYTHON_PREFIX):
        return {"retriever": config.retriever.url}
    first: Facts | None = None
    try:
        addresses = read_urls(config.retriever.url)
        clients = [RetrievalClient(url, max_retries=1) for url in addresses]
    except ValueError as error:
        fix = "correct it, or search nothing: --retriever-url empty"
        raise ConfigError(f"--retriever-url: {error}; fix: {fix}") from error
    for url, client in zip(addresses, clients, strict=True):
        found = await _facts_of(url, client)
        if first is not None and found != first:
            fix = "give addresses of servers with the same corpus and index"
            raise ToolError(explain(f"retriever {url}", found, f"as {first}", fix))
        first = found
    assert first is not None, "read_urls gives at least one"
    return first


async def _facts_of(url: str, client: RetrievalClient) -> Facts:
    try:
        found = await client.info()
    except RetrieverRefused as error:
        if error.status in (401, 403):
            fix = "set RETRIEVER_TOKEN to the server's token"
            raise ToolError(explain(f"retriever {url}", str(error), "access", fix)) from error
        return {"retriever": "unknown", "address": url}  # a server of another make has no /info
    except RetrieverUnavailable as error:
        fix = "bash retrieval_launch.sh, or --retriever-url URL, or --retriever-url empty"
        raise ToolError(explain("retriever", str(error), "a search server", fix)) from error
    finally:
        await client.aclose()
    return {name: value for name, value in found.items() if name not in ALLOWANCES}


KINDS = {"template": str, "tools": list, "max_turns": int, "topk": int}
"""Of what `search_r1.json` may say."""
BOUNDS = {"max_turns": TURNS, "topk": DOCUMENTS}


def run_config(options: AgentOptions, model: str) -> Config:
    """The options of a training run under which the agent is the run's own.

    `model` is the folder of the weights. What the model's folder says of its dialogue
    (`search_r1.json`, written by training) holds where the options say nothing.
    """
    config, own = Config(), _own_settings(model)
    config.actor_rollout_ref.model.path = model
    config.actor_rollout_ref.model.trust_remote_code = options.trust_remote_code
    template = own.get("template")
    if template == TEMPLATE_FILE:
        template = str(Path(model) / TEMPLATE_FILE)
    config.template = _first(options.template, template, config.template)
    code = [tool for tool in own.get("tools") or () if ".py" in tool]
    if code and options.tools is None and not options.trust_remote_code:
        got, expected = f"the tool {code[0]}, which is code", "tools that are built in"
        fix = "--trust-remote-code, once you have read it"
        raise ModelError(explain(f"{SETTINGS_FILE} of {model}", got, expected, fix))
    config.agent.tools = list(_first(options.tools, own.get("tools") or None, config.agent.tools))
    config.max_turns = _first(options.max_turns, own.get("max_turns"), config.max_turns)
    config.retriever.topk = _first(options.topk, own.get("topk"), config.retriever.topk)
    config.retriever.url = options.retriever_url
    for name in ("max_start_length", "max_prompt_length", "max_response_length", "max_obs_length"):
        setattr(config.data, name, getattr(options, name))
    config.trainer.device = options.device
    config.trainer.seed = options.seed or 0
    rollout = config.actor_rollout_ref.rollout
    rollout.name = "remote" if options.endpoint else options.engine
    rollout.url, rollout.served_model = options.endpoint, options.served_model or options.model
    rollout.api_key_env = options.api_key_env
    rollout.dtype = options.dtype
    rollout.max_num_seqs = options.concurrency
    rollout.tensor_model_parallel_size = options.tensor_parallel_size
    rollout.gpu_memory_utilization = options.gpu_memory_utilization
    return config


def _own_settings(model: str) -> dict[str, Any]:
    """What `search_r1.json` of a model's folder says; nothing where there is none."""
    file = Path(model) / SETTINGS_FILE
    if not file.is_file():
        return {}
    with model_errors(model, SETTINGS_FILE, "--model", "what training writes"):
        found = dict(json.loads(file.read_text(encoding="utf-8")))
        for name, kind in KINDS.items():
            value = found.get(name)
            is_kind = type(value) in (kind, NoneType)
            if not is_kind or (value is not None and name in BOUNDS and value not in BOUNDS[name]):
                raise ModelProblem(f"{name}={value!r}")
        if not all(isinstance(tool, str) for tool in found.get("tools") or ()):
            raise ModelProblem(f"tools={found['tools']!r}")
        return found


def _first(*values: Any) -> Any:
    """The first value that is not None."""
    return next(value for value in values if value is not None)


ROOT = Path(__file__).resolve().parents[2]
"""The checkout, or the folder of an installed copy."""
DEMO_MODEL = Path("runs/demo/model")
"""What `make demo` leaves."""
MAX_RETRIES = 2
"""Further attempts of a search: somebody is waiting."""


def with_default_model(options: Options) -> Options:
    """The options with a model: what ships, the demo's, an adapter's base. Raises ModelError."""
    if options.endpoint and not options.model and not options.adapter:
        expected = "the model whose tokenizer --endpoint serves"
        raise ModelError(explain("--model", "nothing", expected, "give --model its folder or name"))
    # What ships is in a checkout of this project alone, and is none of an endpoint's.
    if not options.endpoint and (ROOT / "example" / "smollm2" / "shipped.py").is_file():
        if str(ROOT) not in sys.path:
            sys.path.append(str(ROOT))
        shipped = importlib.import_module("example.smollm2.shipped")
        chosen = shipped.with_model({"model": options.model, "adapter": options.adapter})
        options = replace(options, **chosen)
    return options if options.model else replace(options, model=default_model(options.adapter))


def default_model(adapter: str | None) -> str:
    """The base of an adapter, else the demo's model; raises ModelError when neither is known."""
    if adapter is not None:
        base = base_model_of(Path(adapter))
        if not base:
            fix = "say which with --model"
            raise ModelError(explain(f"--adapter {adapter}", "no base in it", "its base", fix))
        return base
    if not DEMO_MODEL.is_dir():
        fix = "give --model a Hugging Face folder or name (in a checkout make demo trains one)"
        raise ModelError(explain(f"model {DEMO_MODEL}", "no such folder", "a model", fix))
    return str(DEMO_MODEL)


@contextlib.asynccontextmanager
async def opened(options: AgentOptions) -> AsyncIterator[AgentSession]:
    """The agent of these options, running; its retriever is reached first. Raises UserError."""
    await facts_of(_retriever(Config(), options))
    set_trust(options.trust_remote_code)
    options = at_latest_checkpoint(with_default_model(options))
    with folder_of(options) as folder:
        config = _retriever(run_config(options, str(folder)), options)
        agent = load_agent(config)
        tokenizer: Any = agent.tokenizer
        sampling = Sampling(options.max_response_length, options.temperature, options.top_p)
        try:
            async with running_engine(config) as engine:
                longest = min(options.max_start_length, options.max_prompt_length)
                yield AgentSession(agent, engine, tokenizer, sampling, options.seed, longest,
                                   options.num_at_once)  # fmt: skip
        finally:
            await agent.environment.aclose()


def _retriever(config: Config, options: AgentOptions) -> Config:
    config.retriever.url = options.retriever_url
    config.retriever.max_retries = MAX_RETRIES
    return config
