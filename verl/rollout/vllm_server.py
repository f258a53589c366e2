"""A vLLM server that the user started (`vllm serve`), as an engine that takes new weights.

It reads each version from the folder that the ranks wrote, which it must see by the same path. What
weights it has is asked after each completion: one that was started again has those of its start.
The endpoints are those of vLLM's development mode, as of vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import httpx
from pydantic import AliasPath, BaseModel, Field

from verl.config import Config
from verl.errors import AnswerInvalid, ConfigError, explain, redact
from verl.rollout.interface import INTERRUPTED, URL, WEIGHTS_DIR, EngineDied, RolloutEngine
from verl.rollout.remote_engine import (
    COMPLETIONS,
    Answer,
    Choice,
    auth_headers,
    read_body,
    request_body,
    server_root,
)
from verl.rollout.vllm_engine import WORKER_EXTENSION
from verl.training.devices import device_type
from verl.types import Completion, Sampling

logger = logging.getLogger(__name__)

CONNECT_S = 30.0
HEALTH_S = 60.0
"""Longest that a living server takes to say that it lives."""
POLL_S = 2.0
ABORT_S = 0.02
KEEP_S = 1.0
"""An idle connection is used again within this: vLLM's server closes it after 5 s."""
EXACT = {
    "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip
"""Named in each request, since a server has other defaults where its model's folder says so."""


class ServerInfo(BaseModel):
    """What a server computes with, from its answer to `/server_info?config_format=json`."""

    dtype: str = Field(validation_alias=AliasPath("vllm_config", "model_config", "dtype"))
    logprobs_mode: str = Field(
        validation_alias=AliasPath("vllm_config", "model_config", "logprobs_mode")
    )
    device: str | None = Field(validation_alias=AliasPath("vllm_config", "device_config", "device"))
    extension: str = Field(
        validation_alias=AliasPath("vllm_config", "parallel_config", "worker_extension_cls")
    )

    @property
    def loads_in_place(self) -> bool:
        """Whether it has our way of loading; else it has vLLM's own."""
        return self.extension == WORKER_EXTENSION


class WeightInfo(BaseModel):
    """What a server says of its weights."""

    weight_version: str


SERVER_INFO_PATH = "/server_info?config_format=json"


class Refused(Exception):
    """A server answered with another status than success."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status} {' '.join(text.split())[:300]}")
        self.status = status


class VllmServer(RolloutEngine):
    """One server; it is neither started nor ended here, nor does it sleep."""

    takes_weights = True
    can_interrupt = True

    def __init__(
        self,
        url: str,
        served_model: str | None = None,
        api_key_env: str | None = None,
        max_num_seqs: int = 256,
        patience: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """At most `max_num_seqs` completions are asked for at once.

        `patience`: seconds that `start` waits for the server. Raises ConfigError as `auth_headers`.
        """
        self.url, self._patience, self._transport = server_root(url, URL), patience, transport
        self._headers = auth_headers(url, api_key_env)
        self._model = {} if served_model is None else {"model": served_model}
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._http: httpx.AsyncClient | None = None
        self.weight_version, self._weights = 0, ""
        self._running: set[str] = set()
        self._num_asked, self._is_interrupting = 0, False

    @classmethod
    def from_config(cls, config: Config, replica: int) -> Self:
        """The server of address `replica` of `rollout.url`."""
        rollout = config.actor_rollout_ref.rollout
        return cls(
            config.servers[replica],
            rollout.served_model,
            rollout.api_key_env,
            config.max_num_seqs(device_type(config.trainer.device) == "cuda"),
            config.trainer.node_timeout,
        )

    async def start(self) -> None:
        """Wait until the server answers. Raises EngineDied when it stays away."""
        self._http = httpx.AsyncClient(
            headers=self._headers,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(keepalive_expiry=KEEP_S),
            transport=self._transport,
        )
        end = time.monotonic() + self._patience
        while not await self._lives():
            if time.monotonic() > end:
                raise EngineDied(
                    f"{redact(self.url)} has not answered for {self._patience:.0f} s "
                    "(trainer.node_timeout); start it again, as docs/placement.md says"
                )
            logger.warning("waiting for the server at %s", redact(self.url))
            await asyncio.sleep(POLL_S)
        self._facts = ServerInfo.model_validate_json(await self._tell("GET", SERVER_INFO_PATH))

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue `prompt_ids`; ids and log-probs are exactly those that were sampled.

        Raises EngineDied where the server ends, or has other weights than it was given.
        """
        assert self._weights, "weights come before requests"
        version, weights = self.weight_version, self._weights
        # Prefixes are cached by the salt: those of other weights are never found.
        body = {**self._model, **request_body(prompt_ids, sampling), **EXACT, "cache_salt": weights}
        self._num_asked += 1
        try:
            async with self._slots:
                if self._is_interrupting:  # it waited for a slot
                    return Completion((), (), "", INTERRUPTED, version)
                choice = self._choice(await self._complete(body))
                await self._refuse_others(weights)
        finally:
            self._num_asked -= 1
        assert version == self.weight_version, "weights changed while a request was running"
        return _completion(choice, version)

    async def update_weights(self, folder: str, version: int, is_adapter: bool = False) -> None:
        """Have the server read the weights of a folder, and forget what the old ones cached.

        Raises ConfigError where it lives and cannot.
        """
        method, name = "reload_weights", "weights_path"
        if self._facts.loads_in_place:
            method, name = "load_weights_in_place", "weights_dir"
        weights = f"{Path(folder).parent.name}.{version}"  # a salt has no slash
        try:
            await self._ask("POST", "/collective_rpc", {"method": method, "kwargs": {name: folder}})
        except Refused as error:
            if not await self._lives():
                raise EngineDied(f"{redact(self.url)} ended: {error}") from error
            expected = "a server that reads the weights that the ranks write there"
            fix = (
                f"name a folder that ranks and servers share, {WEIGHTS_DIR}=/shared/weights, and "
                "start the server again; its log has the cause"
            )
            got = f"{error} for {folder}"
            raise ConfigError(explain(f"{URL} {self.url}", got, expected, fix)) from error
        await self._tell("POST", "/reset_prefix_cache")
        await self._tell("POST", "/update_weight_version", {"new_version": weights})
        self.weight_version, self._weights = version, weights

    async def interrupt(self) -> None:
        """Abort our requests: vLLM answers each with what it has. Of one on its way it does not
        know yet, so that it is asked again. Those that wait for a slot end without tokens."""
        self._is_interrupting = True
        try:
            while self._num_asked:
                if self._running:
                    running = {"request_ids": sorted(self._running)}
                    await self._tell("POST", "/abort_requests", running)
                await asyncio.sleep(ABORT_S)
        finally:
            self._is_interrupting = False

    async def _complete(self, body: dict[str, Any]) -> bytes:
        """The answer to a request, which has a name while it runs."""
        name = uuid.uuid4().hex
        known = f"cmpl-{name}-0"  # vLLM's own name for the first prompt of a request
        self._running.add(known)
        try:
            return await self._tell("POST", COMPLETIONS, {**body, "request_id": name})
        finally:
            self._running.discard(known)

    async def probe(self) -> None:
        """Return when the server shows that it lives, or raise EngineDied."""
        if self._http is not None and not await self._lives():
            raise EngineDied(f"{redact(self.url)} does not answer")

    async def shutdown(self) -> None:
        """Leave the server, which runs on."""
        if self._http is not None:
            await self._http.aclose()

    def _choice(self, content: bytes) -> Choice:
        try:
            choice = Answer.model_validate_json(content).choices[0]
        except ValueError as error:
            raise self._invalid(f"{type(error).__name__}: {error}") from error
        is_cut = choice.finish_reason == "abort" and self._is_interrupting
        if not is_cut and choice.finish_reason not in ("stop", "length"):  # the server ends
            raise EngineDied(f"{redact(self.url)} ended a request: {choice.finish_reason}")
        given = (choice.logprobs and choice.logprobs.token_logprobs) or []
        if None in given or choice.token_ids is None or len(given) != len(choice.token_ids):
            raise self._invalid("a completion without ids and log-probs of its tokens")
        return choice

    def _invalid(self, got: str) -> AnswerInvalid:
        expected = "a completion of token ids, as vLLM's server gives it"
        fix = "start it with vllm serve (docs/placement.md)"
        return AnswerInvalid(explain(f"{URL} {self.url}", " ".join(got.split()), expected, fix))

    async def _refuse_others(self, weights: str) -> None:
        found = WeightInfo.model_validate_json(await self._tell("GET", "/weight_info"))
        if found.weight_version != weights:
            raise EngineDied(
                f"{redact(self.url)} has the weights {found.weight_version!r}, not {weights!r}: it "
                "was started again, or another run gives it weights too"
            )

    async def _lives(self) -> bool:
        try:
            await self._ask("GET", "/health", seconds=HEALTH_S)
        except (EngineDied, Refused):
            return False
        return True

    async def _tell(self, method: str, path: str, body: Any = None) -> bytes:
        """As `_ask`; raises ConfigError for what is refused, and EngineDied where it fails."""
        try:
            return await self._ask(method, path, body)
        except Refused as error:
            if error.status >= httpx.codes.INTERNAL_SERVER_ERROR:
                raise EngineDied(f"{redact(self.url)}{path} failed: {error}") from error
            fix = "see its log; docs/placement.md has the options that it needs"
            subject = f"{URL} {self.url}{path}"
            raise ConfigError(explain(subject, error, "an answer", fix)) from error

    async def _ask(
        self, method: str, path: str, body: Any = None, seconds: float | None = None
    ) -> bytes:
        """The server's answer. Raises EngineDied where there is none, and Refused."""
        assert self._http is not None, "it was not started"
        given: dict[str, Any] = {} if seconds is None else {"timeout": seconds}
        try:
            async with self._http.stream(method, self.url + path, json=body, **given) as answer:
                content = await read_body(answer)
        except httpx.TransportError as error:
            said = f"{type(error).__name__} {error}".strip()
            raise EngineDied(f"{redact(self.url)}{path}: {said}") from error
        if not answer.is_success:
            raise Refused(answer.status_code, content.decode("utf-8", "replace"))
        return content


def _completion(choice: Choice, version: int) -> Completion:
    """What was sampled; the stop string that ended the text is part of it."""
    assert choice.token_ids is not None and choice.logprobs is not None
    log_probs = tuple(p for p in choice.logprobs.token_logprobs or () if p is not None)
    reason = INTERRUPTED if choice.finish_reason == "abort" else str(choice.finish_reason)
    return Completion(tuple(choice.token_ids), log_probs, choice.text, reason, version)
