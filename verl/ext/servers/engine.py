"""A vLLM server that the user started (`vllm serve`), as an engine that can load new weights.

The server reads each version from the folder that the ranks wrote, which it must see under the same
path. Its weight version is checked after each completion, since a restarted server has its original
weights again. The endpoints are those of vLLM's development mode, as of vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel

from verl.config import Config
from verl.errors import AnswerInvalid, ConfigError, UserError, explain, redact
from verl.ext.engines.remote import (
    COMPLETIONS,
    CONNECT_S,
    KEEPALIVE_S,
    Choice,
    CompletionResponse,
    auth_headers,
    read_body,
    request_body,
    server_root,
)
from verl.ext.servers.answers import SERVER_INFO_PATH, ServerInfo, WeightInfo
from verl.ext.servers.check import server_problems
from verl.ext.servers.choice import WEIGHTS_DIR
from verl.proxies import client_settings
from verl.rollout.interface import URL, EngineDied, RolloutEngine
from verl.training.devices import device_type
from verl.types import Completion, Sampling

logger = logging.getLogger(__name__)

ResponseT = TypeVar("ResponseT", bound=BaseModel)

HEALTH_S = 60.0
"""Maximum seconds that a running server takes to answer a health check."""
POLL_S = 2.0


class HttpError(Exception):
    """A server responded with a status other than success."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status} {' '.join(text.split())[:300]}")
        self.status = status


class VllmServer(RolloutEngine):
    """An engine on one server, which is neither started nor stopped here and never sleeps."""

    takes_weights = True

    def __init__(
        self,
        url: str,
        served_model: str | None = None,
        api_key_env: str | None = None,
        max_num_seqs: int = 256,
        start_timeout: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`max_num_seqs`: maximum concurrent requests; `start_timeout`: seconds to wait in `start`.

        Raises ConfigError as `auth_headers` does.
        """
        self.url = server_root(url, URL)
        self._start_timeout, self._transport = start_timeout, transport
        self._headers = auth_headers(url, api_key_env)
        self._model = {} if served_model is None else {"model": served_model}
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._http: httpx.AsyncClient | None = None
        self.weight_version = 0
        self._weights = ""
        """Name of the weights that the server was told to load."""

    @classmethod
    def from_config(cls, config: Config, replica: int) -> Self:
        """Build the engine for address number `replica` of `rollout.url`."""
        rollout = config.actor_rollout_ref.rollout
        return cls(
            config.placement.servers[replica],
            rollout.served_model,
            rollout.api_key_env,
            config.max_num_seqs(device_type(config.trainer.device) == "cuda"),
            config.trainer.node_timeout,
        )

    @classmethod
    def problems(cls, config: Config) -> Iterator[UserError]:
        """Yield why the run cannot sample from its servers; asks each of them."""
        return server_problems(config)

    async def start(self) -> None:
        """Wait until the server answers. Raises EngineDied if it stays unavailable."""
        self._http = httpx.AsyncClient(
            headers=self._headers,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
            transport=self._transport,
            **client_settings(self.url),
        )
        end = time.monotonic() + self._start_timeout
        while not await self._is_alive():
            if time.monotonic() > end:
                raise EngineDied(
                    f"{redact(self.url)} has not answered for {self._start_timeout:.0f} s "
                    "(trainer.node_timeout); start it again, as docs/guides/rollouts.md says"
                )
            logger.warning("waiting for the server at %s", redact(self.url))
            await asyncio.sleep(POLL_S)
        self._info = await self._read(ServerInfo, "GET", SERVER_INFO_PATH)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue `prompt_ids`; ids and log-probs are exactly those that were sampled.

        Raises EngineDied if the server ends, or has other weights than those it was told to load.
        """
        assert self._weights, "weights must be loaded before the first request"
        version, weights = self.weight_version, self._weights
        # The salt is part of a cached prefix's key, so prefixes of other weights are never reused.
        body = self._model | request_body(prompt_ids, sampling)
        body["cache_salt"] = weights
        async with self._slots:
            choice = self._choice(await self._read(CompletionResponse, "POST", COMPLETIONS, body))
            await self._check_weights(weights)
        assert version == self.weight_version, "weights changed while a request was running"
        return _completion(choice, version)

    async def update_weights(self, folder: str, version: int) -> None:
        """Make the server load the weights of a folder and drop what the old weights cached.

        Raises ConfigError if a running server cannot load them.
        """
        method, argument = "reload_weights", "weights_path"
        if self._info.loads_in_place:
            method, argument = "load_weights_in_place", "source"
        weights = f"{Path(folder).parent.name}.{version}"  # a salt must not contain a slash
        body = {"method": method, "kwargs": {argument: folder}}
        try:
            await self._request("POST", "/collective_rpc", body)
        except HttpError as error:
            if not await self._is_alive():
                raise EngineDied(f"{redact(self.url)} ended: {error}") from error
            expected = "a server that can read the weights that the ranks write there"
            fix = (
                f"name a folder that ranks and servers share, {WEIGHTS_DIR}=/shared/weights, and "
                "start the server again; its log has the cause"
            )
            got = f"{error} for {folder}"
            raise ConfigError(explain(f"{URL} {self.url}", got, expected, fix)) from error
        await self._call("POST", "/reset_prefix_cache")
        await self._call("POST", "/update_weight_version", {"new_version": weights})
        self.weight_version, self._weights = version, weights

    async def score(self, ids: Sequence[int]) -> Sequence[float] | None:
        """Have the server compute the ids as a prompt; None if it returns no log-probs of it."""
        body = self._model | request_body(ids, Sampling(1, temperature=0.0))
        # Not the salt of `generate`: no later request may find these ids in the prefix cache.
        body |= {"prompt_logprobs": 0, "cache_salt": f"{self._weights}.score"}
        choice = (await self._read(CompletionResponse, "POST", COMPLETIONS, body)).choices[0]
        if choice.prompt_logprobs is None:
            return None
        rows = choice.prompt_logprobs[1:]
        return [row[str(i)].logprob for row, i in zip(rows, ids[1:], strict=True) if row]

    async def probe(self) -> None:
        """Return once the server shows that it is alive, or raise EngineDied."""
        if self._http is not None and not await self._is_alive():
            raise EngineDied(f"{redact(self.url)} does not answer")

    async def shutdown(self) -> None:
        """Close the connections; the server keeps running."""
        if self._http is not None:
            await self._http.aclose()

    def _choice(self, response: CompletionResponse) -> Choice:
        choice = response.choices[0]
        if choice.finish_reason not in ("stop", "length"):
            # The server is shutting down.
            raise EngineDied(f"{redact(self.url)} ended a request: {choice.finish_reason}")
        log_probs = (choice.logprobs and choice.logprobs.token_logprobs) or []
        ids = choice.token_ids
        if None in log_probs or ids is None or len(log_probs) != len(ids):
            raise self._invalid(COMPLETIONS, "a completion without ids and log-probs of its tokens")
        return choice

    def _invalid(self, path: str, got: str) -> AnswerInvalid:
        expected = "a response of vLLM's own server, with the ids of sampled tokens"
        fix = "start it with vllm serve (docs/guides/rollouts.md)"
        subject = f"{URL} {self.url}{path}"
        return AnswerInvalid(explain(subject, " ".join(got.split()), expected, fix))

    async def _check_weights(self, weights: str) -> None:
        """Raise EngineDied if the server has other weights than `weights`."""
        info = await self._read(WeightInfo, "GET", "/weight_info")
        if info.weight_version != weights:
            raise EngineDied(
                f"{redact(self.url)} has the weights {info.weight_version!r}, not {weights!r}: it "
                "was restarted, or another run sends it weights too"
            )

    async def _is_alive(self) -> bool:
        try:
            await self._request("GET", "/health", seconds=HEALTH_S)
        except (EngineDied, HttpError):
            return False
        return True

    async def _read(
        self, form: type[ResponseT], method: str, path: str, body: Any = None
    ) -> ResponseT:
        """Like `_call`, but parse the response. Raises AnswerInvalid if it has another form."""
        try:
            return form.model_validate_json(await self._call(method, path, body))
        except (httpx.DecodingError, ValueError) as error:
            raise self._invalid(path, f"{type(error).__name__}: {error}") from error

    async def _call(self, method: str, path: str, body: Any = None) -> bytes:
        """Like `_request`, but raise ConfigError for client and EngineDied for server errors."""
        try:
            return await self._request(method, path, body)
        except HttpError as error:
            if error.status >= httpx.codes.INTERNAL_SERVER_ERROR:
                raise EngineDied(f"{redact(self.url)}{path} failed: {error}") from error
            fix = "see its log; docs/guides/rollouts.md has the options that it needs"
            subject = f"{URL} {self.url}{path}"
            raise ConfigError(explain(subject, error, "a successful response", fix)) from error

    async def _request(
        self, method: str, path: str, body: Any = None, seconds: float | None = None
    ) -> bytes:
        """Send a request and return the response body.

        Raises EngineDied if the server cannot be reached, and HttpError for an error status.
        """
        assert self._http is not None, "the engine was not started"
        timeout: dict[str, Any] = {} if seconds is None else {"timeout": seconds}
        try:
            async with self._http.stream(method, self.url + path, json=body, **timeout) as response:
                content = await read_body(response)
        except httpx.TransportError as error:
            problem = f"{type(error).__name__} {error}".strip()
            raise EngineDied(f"{redact(self.url)}{path}: {problem}") from error
        if not response.is_success:
            raise HttpError(response.status_code, content.decode("utf-8", "replace"))
        return content


def _completion(choice: Choice, version: int) -> Completion:
    assert choice.token_ids is not None and choice.logprobs is not None
    log_probs = tuple(p for p in choice.logprobs.token_logprobs or () if p is not None)
    reason = str(choice.finish_reason)
    return Completion(tuple(choice.token_ids), log_probs, choice.text, reason, version)
