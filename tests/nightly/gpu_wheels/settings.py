"""Resolves an engine's options with vLLM's GPU wheel on a simulated card.

A script for an environment of that wheel, with a stub of libcuda: `settings.py CASES`, where CASES
is a JSON list of {card: {...}, engine: {...}}: a card's facts, and options by dotted name. It
prints one JSON list: for each case the resolved `VllmConfig`, or the error.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch

QWEN_3B = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 2048,
    "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
    "intermediate_size": 11008, "vocab_size": 151936, "max_position_embeddings": 32768,
    "tie_word_embeddings": True, "dtype": "bfloat16", "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "rope_theta": 1e6, "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip


def simulate(card: dict[str, Any]) -> None:
    """Make torch and vLLM see simulated cards; must run before vLLM is imported further."""
    from vllm import platforms  # noqa: PLC0415
    from vllm.platforms.cuda import NonNvmlCudaPlatform  # noqa: PLC0415
    from vllm.platforms.interface import DeviceCapability  # noqa: PLC0415

    capability = tuple(card["capability"])

    class SimulatedPlatform(NonNvmlCudaPlatform):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*capability)

        @classmethod
        def has_device_capability(cls, required: Any, device_id: int = 0) -> bool:
            return capability >= (required if isinstance(required, tuple) else divmod(required, 10))

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return str(card["name"])

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return int(card["gib"]) << 30

        @classmethod
        def device_count(cls) -> int:
            return int(card["count"])

        @classmethod
        def is_fully_connected(cls, ids: list[int]) -> bool:
            return True

    properties = types.SimpleNamespace(
        name=card["name"], total_memory=card["gib"] << 30, major=capability[0],
        minor=capability[1], multi_processor_count=100,
    )  # fmt: skip
    platforms._current_platform = SimulatedPlatform()
    from vllm.config import parallel  # noqa: PLC0415 - it copies the platform

    # vLLM 0.19 counts cards by a function of its own.
    if hasattr(parallel, "cuda_device_count_stateless"):
        parallel.cuda_device_count_stateless = lambda: int(card["count"])
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: int(card["count"])
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.get_device_capability = lambda device=None: capability


def resolve(case: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with which an engine of this case starts."""
    simulate(case["card"])
    from verl.config import Config  # noqa: PLC0415
    from verl.preflight.undecided import with_options  # noqa: PLC0415
    from verl.rollout.interface import build_engine  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN_3B))
        options = {"trainer.device": "cuda", "actor_rollout_ref.model.path": folder}
        ours = build_engine(with_options(Config(), options | case["engine"])).settings
        os.environ |= ours.environment()
        resolved = read(ours.arguments())
    return {
        "kernels": has_kernels(case["card"]),
        "batch_invariant": ours.batch_invariant,
        **resolved,
    }


def has_kernels(card: dict[str, Any]) -> bool:
    """Return whether this torch was built for the card: same major, no later minor number."""
    major, minor = card["capability"]
    built = [divmod(int(a.removeprefix("sm_")), 10) for a in torch._C._cuda_getArchFlags().split()]
    return any(arch[0] == major and arch[1] <= minor for arch in built)


def read(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the values to which vLLM resolves our arguments, as JSON."""
    import vllm  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415
    from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415
    from vllm.v1.attention.selector import get_attn_backend  # noqa: PLC0415

    options = vllm.AsyncEngineArgs(**arguments, skip_tokenizer_init=True)
    config = options.create_engine_config(UsageContext.ENGINE_CONTEXT)
    current_platform.check_if_supports_dtype(config.model_config.dtype)
    scheduler, compilation = config.scheduler_config, config.compilation_config
    heads = config.model_config.get_head_size()
    with vllm.config.set_current_vllm_config(config):
        backend = get_attn_backend(heads, getattr(torch, arguments["dtype"]), "auto")
    return {
        "vllm": vllm.__version__,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
        "chunked_prefill": scheduler.enable_chunked_prefill,
        "async_scheduling": scheduler.async_scheduling,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "sleep_mode": config.model_config.enable_sleep_mode,
        "executor": str(config.parallel_config.distributed_executor_backend),
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "custom_all_reduce": not config.parallel_config.disable_custom_all_reduce,
        "cudagraph_mode": compilation.cudagraph_mode.name,
        "largest_graph": compilation.max_cudagraph_capture_size,
        "attention": backend.get_name(),
        "lora_rank": config.lora_config.max_lora_rank if config.lora_config else 0,
        "runner": "v2" if getattr(config, "use_v2_model_runner", False) else "v1",
        "quantization": str(config.model_config.quantization),
        "kv_cache": config.cache_config.cache_dtype,
        "speculation": config.speculative_config.method if config.speculative_config else "none",
    }


def in_child(case: dict[str, Any]) -> dict[str, Any]:
    """Run `resolve` in its own process, since a process has one platform and environment."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = resolve(case)
        except Exception as error:  # noqa: BLE001 (any error is the result)
            answer = {"error": f"{type(error).__name__}: {error}"}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        text = answers.read()
    os.waitpid(child, 0)
    return dict(json.loads(text)) if text else {"error": "the process died"}


def main(cases: list[dict[str, Any]]) -> None:
    """Print the results of all cases."""
    import vllm  # noqa: F401, PLC0415 - once, for all children

    print(json.dumps([in_child(case) for case in cases]))  # noqa: T201


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
