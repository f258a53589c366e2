"""The settings of a vLLM engine: what a run's options mean as arguments and environment of vLLM."""

from __future__ import annotations

from typing import Any

from verl.config import Config
from verl.config.engine_kwargs import given
from verl.remote_code import trusts_remote_code
from verl.rollout import vllm_build
from verl.threads import PASSIVE
from verl.training.devices import device_type, rollout_dtype

CPU_ENV = {
    # The worker runs inside the engine core's process: one process fewer to start.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Engine and trainer use the same cores in turn; threads bound to cores would share one.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Waiting threads that spin would slow down working ones (see `ext.cpu_env`).
    **PASSIVE,
}
QUIET_ENV = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
MIN_BATCHED_TOKENS = 8192
CPU_BLOCK = 32
"""Tokens per block of the prefix cache on the CPU, the minimum of its kernels. Most first turns are
shorter than vLLM's default of 128 and would not be cached for the next turn."""
WORKER_EXTENSION = "verl.rollout.weight_loading.WeightLoading"


class VllmSettings:
    """The settings of one vLLM engine of a run; replicas differ in their seed."""

    sleep_level = 2
    """vLLM's sleep level: 1 keeps a copy of the weights on the host, 2 drops them.

    Weights are always loaded before the next request (`RayPPOTrainer.update_weights`; a restarted
    replica also loads the current ones), so a copy would only be overwritten. vLLM keeps the
    model's buffers, which the weights folder lacks, at both levels."""

    def __init__(self, config: Config, replica: int = 0) -> None:
        self.config, self.seed = config, config.trainer.seed + replica
        self.device = device_type(config.trainer.device)
        self.max_num_seqs = config.max_num_seqs(self.device == "cuda")
        self.deterministic = config.trainer.deterministic
        """Disables the prefix cache, and batching unless the kernels are `batch_invariant`, so that
        other requests cannot change the rounding of a request's results."""
        self.batch_invariant = self.deterministic and vllm_build.is_batch_invariant(self.device)
        """Whether to use vLLM's kernels whose results do not depend on the rest of the batch."""
        self.loads_weights = True
        """Whether the engine starts with the model's weights; otherwise with random ones."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of vLLM's `AsyncEngineArgs`; those of the user win."""
        section = self.config.actor_rollout_ref
        is_alone = self.deterministic and not self.batch_invariant
        shared = {
            "model": section.model.path,
            "dtype": rollout_dtype(self.config),
            "max_model_len": self.config.data.max_model_len,
            "max_num_seqs": 1 if is_alone else self.max_num_seqs,
            "seed": self.seed,
            "trust_remote_code": trusts_remote_code(),
            "enable_prefix_caching": not self.deterministic,
            "logprobs_mode": "processed_logprobs",
            # Not the sampling of the model's generation_config.json; its end tokens still count.
            "generation_config": "vllm",
            "disable_log_stats": True,
            "load_format": "auto" if self.loads_weights else "dummy",
            "worker_extension_cls": WORKER_EXTENSION,
            "use_tqdm_on_load": False,
        }
        of_device = self._cpu_arguments() if self.device == "cpu" else self._gpu_arguments()
        return shared | of_device | given(section.rollout.engine_kwargs)

    def _cpu_arguments(self) -> dict[str, Any]:
        """Return the arguments for an engine on the CPU.

        Prompts are not prefilled in chunks: vLLM would have to rewind the random state of a seeded
        request, which CPU generators do not support. So one step must be able to process the
        longest context.
        """
        return {
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "block_size": CPU_BLOCK,
            "max_num_batched_tokens": batched_tokens(
                self.max_num_seqs, self.config.data.max_model_len
            ),
            "distributed_executor_backend": "uni",
        }

    def _gpu_arguments(self) -> dict[str, Any]:
        """Return the arguments for an engine on GPUs."""
        rollout = self.config.actor_rollout_ref.rollout
        # vLLM 0.33 leaves it on and uses NCCL above some size, which adds in another order.
        exact = {"disable_custom_all_reduce": True} if self.batch_invariant else {}
        return exact | {
            "max_num_batched_tokens": batched_tokens(self.max_num_seqs),
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "tensor_parallel_size": rollout.tensor_model_parallel_size,
            "enable_sleep_mode": not self.config.placement.is_split,
        }

    def environment(self) -> dict[str, str]:
        """Return environment variables to set before vLLM is imported, unless the user did."""
        if self.device != "cpu":
            return QUIET_ENV | ({vllm_build.BATCH_INVARIANT: "1"} if self.batch_invariant else {})
        cache = self.config.actor_rollout_ref.rollout.cpu_kv_cache_gib
        return QUIET_ENV | CPU_ENV | {"VLLM_CPU_KVCACHE_SPACE": str(cache)}


def batched_tokens(max_num_seqs: int, longest_prefill: int = 0) -> int:
    """Return the maximum tokens of an engine step; `longest_prefill` if prompts are not chunked."""
    return max(MIN_BATCHED_TOKENS, max_num_seqs, longest_prefill)
