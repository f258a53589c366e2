"""Builds an agent: from its options, the settings of its model's folder, and the model's files."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from search_r1.agent.generation import build_agent
from search_r1.inference.agent_options import AgentOptions
from verl.agent.dialogue import DialogueAgent
from verl.agent.settings import SETTINGS, SETTINGS_FILE, get_option, limits_of, set_option
from verl.agent.wording import TEMPLATE_FILE
from verl.config import Config
from verl.errors import ConfigError, ModelError, explain, misspelt
from verl.json_files import read_object
from verl.model_files import (
    ModelProblem,
    check_context,
    check_finite_files,
    check_model,
    check_template,
    load_tokenizer,
    model_errors,
)
from verl.plugins import PYTHON_PREFIX
from verl.training.devices import device_type

logger = logging.getLogger(__name__)

OPTIONS = {name: key for key, name in SETTINGS.items()}
"""Keys of `search_r1.json`, and the options of a run that they are."""


def run_config(options: AgentOptions, model: str) -> Config:
    """Build a run's configuration; options that are not set come from the model's settings.

    `model` is the folder of the weights; training writes its settings, `search_r1.json`.
    """
    config = Config()
    saved = _read_settings(model)
    config.actor_rollout_ref.model.path = model
    config.actor_rollout_ref.model.trust_remote_code = options.trust_remote_code
    if saved.get("template") == TEMPLATE_FILE:
        saved["template"] = str(Path(model) / TEMPLATE_FILE)
    if not options.trust_remote_code:
        _refuse_foreign(saved, options, f"{SETTINGS_FILE} of {model}")
    given = {name: getattr(options, name, None) for name in OPTIONS}
    if given["tools"] is not None:
        given["tools"] = list(given["tools"])
        given["do_search"] = True if given["do_search"] is None else given["do_search"]
    for name, key in OPTIONS.items():
        set_option(config, key, _first(given[name], saved.get(name), get_option(config, key)))
    if not config.do_search and given["do_search"] is None:
        logger.warning(
            "%s was trained without its tools, and has none here: --do-search True", model
        )
    config.retriever.url = options.retriever_url
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
        settings = {name: value for name, value in settings.items() if value is not None}
        for name in filter(settings.__contains__, OPTIONS):
            _check_value(name, settings[name])
        return settings


def _check_value(name: str, value: Any) -> None:
    """Raise ModelProblem for a value that its option could not have."""
    kind, limits = type(get_option(Config(), OPTIONS[name])), limits_of(OPTIONS[name])
    is_list = isinstance(value, list)
    # Not `isinstance`, which accepts a bool as an int.
    is_kind = type(value) is kind and not (is_list and any(type(one) is not str for one in value))
    if not (is_kind and limits.allows(value)):
        raise ModelProblem(f"{name}={value!r}")


def _refuse_foreign(saved: Mapping[str, Any], options: AgentOptions, subject: str) -> None:
    """Raise ModelError for settings that run code of a file, or talk to another server.

    Options that were given replace them.
    """
    code = [tool for tool in saved.get("tools", ()) if ".py" in tool]
    fix = "--trust-remote-code, once you have read it"
    if code and options.tools is None:
        got = f"the tool {code[0]}, which is code"
        raise ModelError(explain(subject, got, "built-in tools", fix))
    agent = saved.get("agent", "")
    if ":" in agent and not agent.startswith(PYTHON_PREFIX) and options.agent is None:
        got = f"the agent {agent}, which is {'code' if '.py:' in agent else 'a server'}"
        fix = f"--agent {agent} or --trust-remote-code if you trust it, or --agent dialogue"
        raise ModelError(explain(subject, got, "a built-in agent", fix))


def _check_names(settings: Mapping[str, Any]) -> None:
    """Raise ModelProblem for a key that has no effect, unless a user's tool may have stored it.

    A name that is almost that of a setting is never a tool's.
    """
    tools = settings.get("tools")
    has_own_tools = isinstance(tools, list) and any(":" in str(tool) for tool in tools)
    for name in settings.keys() - OPTIONS.keys():
        fix = misspelt(name, OPTIONS)
        if fix or not has_own_tools:
            known = ", ".join(OPTIONS)
            raise ModelProblem(f"unknown key {name}; {fix or f'expected some of {known}'}")


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def checked_agent(config: Config) -> DialogueAgent:
    """Build the agent after checking the model's files. Raises ModelError."""
    section, subject = config.actor_rollout_ref, "--model"
    if section.rollout.name == "remote":
        check_template(load_tokenizer(section.model.path, subject), section.model.path, subject)
    else:
        by_transformers = section.rollout.name == "transformers"
        model = check_model(
            subject, section.model.path, by_transformers=by_transformers, may_be_quantized=True
        )
        names = ("--max-prompt-length", "--max-response-length")
        check_context(model, section.model.path, config.data, *names)
        if not by_transformers and device_type(config.trainer.device) == "cpu":
            # vLLM repacks weights on the CPU, so NaN can only be found in the files; other engines
            # are checked after loading.
            check_finite_files(section.model.path, subject)
    agent = build_agent(config)
    if not isinstance(agent, DialogueAgent):
        got = f"{config.agent.name}, which gives {type(agent).__name__}"
        expected = "a verl.agent.dialogue.DialogueAgent, whose dialogues can be followed"
        fix = "derive it from that class, or --agent dialogue for the built-in loop"
        raise ConfigError(explain("--agent", got, expected, fix))
    return agent
