"""An engine behind an OpenAI-compatible `/v1/completions` that accepts token ids as the prompt.

It cannot load new weights, so it is for inference only; the engine of `verl.ext.servers` can.
vLLM's server returns the sampled ids. If a server does not, its text is encoded again, which may
yield other ids than those that were sampled.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import ssl
from collections.abc import Sequence
from typing import Annotated, Any, Protocol, Self

import httpx
from pydantic import BaseModel, Field, StrictStr

from verl.config import Config
from verl.errors import AnswerInvalid, ConfigError, explain, redact
from verl.model_files import load_tokenizer
from verl.proxies import client_settings
from verl.rollout.interface import URL, RolloutEngine
from verl.types import Completion, Sampling

logger = logging.getLogger(__name__)

OPENAI, OPENAI_KEY = "https://api.openai.com/", "OPENAI_API_KEY"
TIMEOUT = 600.0
"""Maximum seconds for one completion."""
MAX_BYTES = 64 << 20
"""Maximum size of a response."""
COMPLETIONS = "/v1/completions"
CONNECT_S = 30.0
KEEPALIVE_S = 1.0
"""Seconds after which an idle connection is not used again; vLLM's server closes it after 5 s."""
SAMPLING_DEFAULTS: dict[str, Any] = {
    "n": 1, "echo": False, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0, "ignore_eos": False,
    "stop_token_ids": [], "logit_bias": None,
}  # fmt: skip
"""Sent with each request, since the server and the files of its model may change the defaults."""
EXTENSIONS = (
    "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids",
    "include_stop_str_in_output", "skip_special_tokens", "return_token_ids",
)  # fmt: skip
"""Fields that OpenAI's own API lacks. A server that does not know one cannot change its default."""
UNKNOWN = re.compile(
    r"unrecogni[sz]ed|unknown|unexpected|not permitted|extra.(inputs|fields|forbidden)|"
    r"unsupported (parameter|argument|field)",
    re.IGNORECASE,
)
"""How servers say that they do not know a field, and not that they refuse its value."""
REFUSED = (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY)


class Encoder(Protocol):
    """The part of a tokenizer that is needed if the server returns only text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


class LogProbs(BaseModel):
    """The log-probs of the sampled tokens."""

    token_logprobs: list[float | None] | None = None


class PromptLogProb(BaseModel):
    """The log-prob of one token of the prompt."""

    logprob: float


class Choice(BaseModel):
    """The fields of a completion that are used; values of other types are rejected."""

    text: StrictStr
    finish_reason: Any = None
    stop_reason: Any = None
    """Of vLLM: the stop string that ended the text; an id or null for an end of sequence."""
    token_ids: list[Annotated[int, Field(strict=True, ge=0)]] | None = None
    logprobs: LogProbs | None = None
    prompt_logprobs: list[dict[str, PromptLogProb] | None] | None = None
    """By token id, for each token of the prompt; None for the first."""


class CompletionResponse(BaseModel):
    """The response body of `/v1/completions`."""

    choices: Annotated[list[Choice], Field(min_length=1)]


class RemoteEngine(RolloutEngine):
    """An engine on a server that is started and stopped by someone else."""

    def __init__(
        self,
        base_url: str,
        model: str,
        tokenizer: Encoder,
        api_key_env: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`base_url` may end with `/v1`; `api_key_env` is the environment variable with the key.

        If it is None, OPENAI_API_KEY is sent to OpenAI's own address, and no key elsewhere. Raises
        ConfigError for a variable that is not set.
        """
        self.url = server_root(base_url) + COMPLETIONS
        self._model = model
        self._tokenizer = tokenizer
        self._headers = auth_headers(base_url, api_key_env)
        self._clients = ClientOfLoop(self.url, transport)
        self._unknown: set[str] = set()
        """Fields of `EXTENSIONS` that the server said it does not know."""

    @classmethod
    def from_config(cls, config: Config, replica: int) -> Self:
        """Build the engine for `rollout.url`, the same for every replica. Raises ConfigError."""
        section = config.actor_rollout_ref
        if section.rollout.url is None:
            fix = f"{URL}=http://host:8000"
            raise ConfigError(explain(URL, "null", "a server's address", fix))
        served = section.rollout.served_model or section.model.path
        tokenizer = load_tokenizer(section.model.path)
        return cls(section.rollout.url, served, tokenizer, section.rollout.api_key_env)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue `prompt_ids`.

        Raises ConfigError if the endpoint is unavailable or rejects the request, AnswerInvalid if
        the response is not a completion.
        """
        fields = request_body(prompt_ids, sampling)
        body = {"model": self._model} | {k: v for k, v in fields.items() if k not in self._unknown}
        try:
            async with asyncio.timeout(TIMEOUT):
                status, content = await self._post(body)
                while status in REFUSED and self._forget_unknown(body, content):
                    status, content = await self._post(body)
            if not httpx.codes.is_success(status):
                got = f"{status} {content[:300].decode('utf-8', 'replace')}"
                raise self._error(ConfigError, got)
            choice = CompletionResponse.model_validate_json(content).choices[0]
        except (httpx.TransportError, TimeoutError) as error:
            raise self._error(ConfigError, f"{type(error).__name__}: {error}") from error
        except (httpx.DecodingError, ValueError) as error:
            raise self._error(AnswerInvalid, f"{type(error).__name__}: {error}") from error
        return self._completion(choice, sampling)

    async def shutdown(self) -> None:
        """Close the connections; the server keeps running."""
        await self._clients.close()

    async def _post(self, body: dict[str, Any]) -> tuple[int, bytes]:
        """Send a request and return the status and the body of the response."""
        http = await self._clients.get()
        async with http.stream("POST", self.url, json=body, headers=self._headers) as response:
            return response.status_code, await read_body(response)

    def _forget_unknown(self, body: dict[str, Any], content: bytes) -> bool:
        """Remove the fields from `body` that the server says it does not know, if there are any."""
        answer = content.decode("utf-8", "replace")
        if not UNKNOWN.search(answer):
            return False
        named = [k for k in EXTENSIONS if k in body and re.search(rf"\b{k}\b", answer)]
        for name in named:
            del body[name]
        new = [name for name in named if name not in self._unknown]
        if new:
            logger.warning(
                "%s does not know %s: asked without; sampling is as configured only if the server "
                "has no such setting of its own", redact(self.url), ", ".join(new),
            )  # fmt: skip
            self._unknown.update(new)
        return bool(named)

    def _completion(self, choice: Choice, sampling: Sampling) -> Completion:
        text = choice.text
        reason = "length" if choice.finish_reason == "length" else "stop"
        if reason == "stop":
            text += missing_stop(text, self._possible_stops(choice, sampling))
        ids = choice.token_ids
        if ids is None:
            logger.warning("%s returns no token_ids: its text is encoded again", redact(self.url))
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        reported = choice.logprobs.token_logprobs if choice.logprobs else None
        log_probs = [math.nan if p is None else p for p in reported or ()]
        if len(log_probs) != len(ids):
            log_probs = [math.nan] * len(ids)
        return Completion(tuple(ids), tuple(log_probs), text, reason)

    def _possible_stops(self, choice: Choice, sampling: Sampling) -> Sequence[str]:
        """Return the stop strings that may have ended a text: that which the server names, if any.

        Servers that name none, nor that it was another end, leave us to guess.
        """
        if "stop_reason" not in choice.model_fields_set:
            return sampling.stop
        return [tag for tag in sampling.stop if tag == choice.stop_reason]

    def _error(self, error_type: type[ConfigError], got: str) -> ConfigError:
        fix = (
            "start an OpenAI-compatible server there (vllm serve MODEL) or correct --endpoint "
            "(for a run: rollout.url); if it requires a key, name the variable that holds it: "
            "--api-key-env (rollout.api_key_env)"
        )
        subject, got = f"endpoint {self.url}", " ".join(got.split())
        return error_type(explain(subject, got, "a completion of token ids", fix))


class ClientOfLoop:
    """One HTTP client, made again only if it is used from another event loop.

    A client made for each request would read the certificates each time, which takes 33 ms of CPU.
    """

    def __init__(self, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """Make no client yet; `transport` replaces the network in tests."""
        self._url, self._transport = url, transport
        self._http: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tls: ssl.SSLContext | None = None

    async def get(self) -> httpx.AsyncClient:
        """Return the client of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._http is None or self._loop is not loop:
            await self.close()
            settings = client_settings(self._url)
            self._tls = self._tls or settings.get("verify") or httpx.create_ssl_context()
            self._http = httpx.AsyncClient(
                timeout=httpx.Timeout(TIMEOUT, connect=min(CONNECT_S, TIMEOUT)),
                limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
                transport=self._transport,
                **settings | {"verify": self._tls},
            )
            self._loop = loop
        return self._http

    async def close(self) -> None:
        """Close the connections, if their event loop is still the running one."""
        http, self._http = self._http, None
        if http is not None and self._loop is asyncio.get_running_loop():
            await http.aclose()


def server_root(base_url: str, option: str = "endpoint") -> str:
    """Return an address without `/v1`; raises ConfigError naming `option` if it is invalid."""
    try:
        httpx.URL(base_url)
    except httpx.InvalidURL as error:
        got, fix = f"{base_url} ({error})", "as in http://host:8000"
        raise ConfigError(explain(option, got, "a server's address", fix)) from error
    return base_url.rstrip("/").removesuffix("/v1")


def auth_headers(base_url: str, api_key_env: str | None) -> dict[str, str]:
    """Return the HTTP header with the key of the variable `api_key_env`; see `RemoteEngine`."""
    variable = api_key_env or (OPENAI_KEY if base_url.startswith(OPENAI) else "")
    key = os.environ.get(variable)
    if api_key_env and not key:
        expected, fix = "a variable that is set", f"export {api_key_env}=KEY"
        raise ConfigError(explain("api_key_env", api_key_env, expected, fix))
    return {"Authorization": f"Bearer {key}"} if key else {}


def request_body(prompt_ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
    """Return the request body for one completion, without the model's name."""
    return {
        "prompt": list(prompt_ids),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop": list(sampling.stop),
        "seed": sampling.seed,
        "logprobs": 0,
        # vLLM extensions. For other servers, the stop string and the ids are restored afterwards.
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "return_token_ids": True,
        **SAMPLING_DEFAULTS,
    }


async def read_body(response: httpx.Response) -> bytes:
    """Read the body of a response; raises ValueError if it exceeds MAX_BYTES."""
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
    return bytes(content)


def missing_stop(text: str, stop: Sequence[str]) -> str:
    """Return the closing tag that the server omitted, that of the last open tag; may be empty.

    *Example*: `"</answer>"` for `"<answer> Oslo"`; nothing for a text that ends with its tag.
    """
    if any(text.rstrip().endswith(tag) for tag in stop):
        return ""
    opening_positions = {tag: text.rfind(tag.replace("</", "<")) for tag in stop}
    open_tags = {tag: at for tag, at in opening_positions.items() if at > text.rfind(tag)}
    return max(open_tags, key=lambda tag: open_tags[tag]) if open_tags else ""
