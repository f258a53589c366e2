"""Builds an agent: from its options, the settings of its model's folder, and the model's files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from search_r1.agent.generation import AGENTS, agent_kind
from search_r1.inference.agent_options import DOCUMENTS, SETTINGS_FILE, TURNS, AgentOptions
from verl.agent.dialogue import DialogueAgent
from verl.agent.wording import TEMPLATE_FILE
from verl.config import Config
from verl.errors import ModelError, explain, misspelt
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
from verl.training.devices import device_type

SETTING_TYPES = {
    "template": str, "agent": str, "tools": list, "max_turns": int, "topk": int,
    "chat_template_kwargs": dict,
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
    config.agent.name = _first(options.agent, saved.get("agent"), config.agent.name)
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
        if (settings.get("agent") or "dialogue") not in AGENTS:
            raise ModelProblem(f"agent={settings['agent']!r}")
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
    return AGENTS[agent_kind(config.agent.name)](config)
