"""`rollout.engine_kwargs`: arguments for vLLM's engine, and what a run itself reads of them.

vLLM is not imported, which takes seconds: the names that it has are read from its source.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.errors import ConfigError, did_you_mean, explain

KEY = "actor_rollout_ref.rollout.engine_kwargs"
_ROLLOUT, _MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
OWN_OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(("model", "tokenizer"), f"set {_MODEL}.path"),
    "trust_remote_code": f"set {_MODEL}.trust_remote_code",
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank"), f"set {_MODEL}.lora_rank"),
    "dtype": f"set {_ROLLOUT}.dtype",
    "max_model_len": "set data.max_prompt_length and data.max_response_length",
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens"), f"set {_ROLLOUT}.max_num_seqs"),
    "gpu_memory_utilization": f"set {_ROLLOUT}.gpu_memory_utilization",
    **dict.fromkeys(
        ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
        f"set {_ROLLOUT}.tensor_model_parallel_size",
    ),
    **dict.fromkeys(
        ("generation_config", "override_generation_config"),
        f"set {_ROLLOUT}.temperature and {_ROLLOUT}.top_p",
    ),
    "seed": "set trainer.seed",
    "enable_sleep_mode": "set trainer.rollout_gpus",
    "disable_log_stats": "set trainer.trace",
    "enable_chunked_prefill": "leave it out: a seeded request decides it",
    "logprobs_mode": "leave it out: the loss needs the log-probs of what was sampled",
    **dict.fromkeys(
        ("load_format", "worker_extension_cls"), "leave it out: training ranks send the weights"
    ),
}
"""Arguments that the run itself decides, and what to do instead of setting them."""
FULL_CACHE = ("auto", "bfloat16", "float16", "float32")
"""Formats of the KV cache that are as exact as the engine's arithmetic."""


def check(engine_kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments that the run decides itself or that vLLM does not have."""
    if lines := list(_problems(given(engine_kwargs))):
        raise ConfigError("\n".join(lines))


def _problems(arguments: Mapping[str, Any]) -> Iterator[str]:
    known = vllm_arguments()
    for name, value in arguments.items():
        if name in OWN_OPTIONS:
            yield explain(f"{KEY}.{name}", value, "nothing: the run decides it", OWN_OPTIONS[name])
        elif known and name not in known:
            expected = "an argument of the installed vLLM (vllm/engine/arg_utils.py)"
            fix = did_you_mean(name, known, "leave it out")
            yield explain(f"{KEY}.{name}", repr(value), expected, fix)


def given(engine_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are set; null leaves one to the run and vLLM."""
    return {name: value for name, value in engine_kwargs.items() if value is not None}


@functools.cache
def vllm_arguments() -> frozenset[str]:
    """Return the fields of the installed vLLM's `AsyncEngineArgs`; empty without vLLM."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return frozenset()
    source = Path(found.origin).with_name("engine") / "arg_utils.py"
    classes = (
        node for node in ast.parse(source.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
    )  # fmt: skip
    return frozenset(
        field.target.id for kind in classes for field in kind.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )  # fmt: skip


def quantizes_weights(engine_kwargs: Mapping[str, Any]) -> bool:
    """Whether vLLM computes the blocks' linear layers with weights of at most one byte."""
    return engine_kwargs.get("quantization") is not None


def quantizes_cache(engine_kwargs: Mapping[str, Any]) -> bool:
    """Whether vLLM keeps keys and values in at most one byte each."""
    return (engine_kwargs.get("kv_cache_dtype") or "auto") not in FULL_CACHE


def is_approximate(engine_kwargs: Mapping[str, Any]) -> bool:
    """Whether log-probs of engine and trainer differ by more than rounding."""
    return quantizes_weights(engine_kwargs) or quantizes_cache(engine_kwargs)
