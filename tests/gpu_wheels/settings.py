"""What vLLM's GPU wheel makes of an engine's options on a card that is pretended.

A script for an environment of that wheel, with a stub of libcuda: `settings.py CASES`, where CASES
is a JSON list of {card: {...}, engine: {...}}: a card's facts, and options by dotted name. Prints
one JSON list: for each case what `VllmConfig` resolves to, or the error that it ends in.
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


def pretend(card: dict[str, Any]) -> None:
    """Have torch and vLLM see cards of these facts; before vLLM is imported any further."""
    from vllm import platforms  # noqa: PLC0415
    from vllm.platforms.cuda import NonNvmlCudaPlatform  # noqa: PLC0415
    from vllm.platforms.interface import DeviceCapability  # noqa: PLC0415

    capability = tuple(card["capability"])

    class Pretended(NonNvmlCudaPlatform):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*capability)

        @classmethod
        def has_device_capability(cls, wanted: Any, device_id: int = 0) -> bool:
            return capability >= (wanted if isinstance(wanted, tuple) else divmod(wanted, 10))

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

    facts = types.SimpleNamespace(
        name=card["name"], total_memory=card["gib"] << 30, major=capability[0],
        minor=capability[1], multi_processor_count=100,
    )  # fmt: skip
    platforms._current_platform = Pretended()
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: int(card["count"])
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: facts
    torch.cuda.get_device_capability = lambda device=None: capability


def resolve(case: dict[str, Any]) -> dict[str, Any]:
    """The settings that an engine of this case starts with."""
    pretend(case["card"])
    from verl.config import Config  # noqa: PLC0415
    from verl.preflight.memory.check import with_options  # noqa: PLC0415
    from verl.rollout.vllm_engine import VllmSettings  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN_3B))
        options = {"trainer.device": "cuda", "actor_rollout_ref.model.path": folder}
        ours = VllmSettings(with_options(Config(), options | case["engine"]))
        os.environ |= ours.environment()
        found = read(ours.arguments())
    return {"kernels": has_kernels(case["card"]), "batch_invariant": ours.batch_invariant, **found}


def has_kernels(card: dict[str, Any]) -> bool:
    """Whether this torch was built for the card: for its generation, no later minor number."""
    major, minor = card["capability"]
    built = [divmod(int(a.removeprefix("sm_")), 10) for a in torch._C._cuda_getArchFlags().split()]
    return any(one[0] == major and one[1] <= minor for one in built)


def read(arguments: dict[str, Any]) -> dict[str, Any]:
    """What vLLM resolves our arguments to, as JSON."""
    import vllm  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415
    from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415
    from vllm.v1.attention.selector import get_attn_backend  # noqa: PLC0415

    options = vllm.AsyncEngineArgs(**arguments, skip_tokenizer_init=True)
    found = options.create_engine_config(UsageContext.ENGINE_CONTEXT)
    current_platform.check_if_supports_dtype(found.model_config.dtype)
    scheduler, compilation = found.scheduler_config, found.compilation_config
    heads = found.model_config.get_head_size()
    with vllm.config.set_current_vllm_config(found):
        backend = get_attn_backend(heads, getattr(torch, arguments["dtype"]), "auto")
    return {
        "vllm": vllm.__version__,
        "dtype": str(found.model_config.dtype).removeprefix("torch."),
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
        "chunked_prefill": scheduler.enable_chunked_prefill,
        "async_scheduling": scheduler.async_scheduling,
        "prefix_caching": found.cache_config.enable_prefix_caching,
        "sleep_mode": found.model_config.enable_sleep_mode,
        "executor": str(found.parallel_config.distributed_executor_backend),
        "tensor_parallel": found.parallel_config.tensor_parallel_size,
        "custom_all_reduce": not found.parallel_config.disable_custom_all_reduce,
        "cudagraph_mode": compilation.cudagraph_mode.name,
        "largest_graph": compilation.max_cudagraph_capture_size,
        "attention": backend.get_name(),
        "lora_rank": found.lora_config.max_lora_rank if found.lora_config else 0,
        "runner": "v2" if found.use_v2_model_runner else "v1",
        "quantization": str(found.model_config.quantization),
        "kv_cache": found.cache_config.cache_dtype,
        "guesses": found.speculative_config.method if found.speculative_config else "none",
    }


def in_child(case: dict[str, Any]) -> dict[str, Any]:
    """`resolve` in a process of its own: platform and environment are of one case."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = resolve(case)
        except Exception as error:  # noqa: BLE001 (it is the answer)
            answer = {"error": f"{type(error).__name__}: {error}"}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        text = answers.read()
    os.waitpid(child, 0)
    return dict(json.loads(text)) if text else {"error": "the process died"}


def main(cases: list[dict[str, Any]]) -> None:
    """Print the answers to all cases."""
    import vllm  # noqa: F401, PLC0415 - once, for all children

    print(json.dumps([in_child(case) for case in cases]))  # noqa: T201


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
