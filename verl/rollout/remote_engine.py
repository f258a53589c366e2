"""An engine behind an OpenAI-compatible `/v1/completions` that takes token ids as prompt.

It cannot be given new weights, so it is for inference only (`vllm_server` has the engine that can).
vLLM's server returns the sampled ids; of a server that does not, the text is encoded again, which
may give other ids than were sampled.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Sequence
from typing import Annotated, Any, Protocol, Self

import httpx
from pydantic import BaseModel, Field, StrictStr

from verl.config import Config
from verl.errors import AnswerInvalid, ConfigError, explain, redact
from verl.model_files import load_tokenizer
from verl.rollout.interface import URL, RolloutEngine
from verl.types import Completion, Sampling

logger = logging.getLogger(__name__)

OPENAI, OPENAI_KEY = "https://api.openai.com/", "OPENAI_API_KEY"
TIMEOUT = 600.0
"""Seconds one completion may take."""
MOST_BYTES = 64 << 20
"""Of a completion."""
COMPLETIONS = "/v1/completions"


class Encoder(Protocol):
    """What is needed of a tokenizer where the server returns text only."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


class LogProbs(BaseModel):
    """Of the sampled tokens."""

    token_logprobs: list[float | None] | None = None


class Choice(BaseModel):
    """What is read of a completion; a value of another type is no completion."""

    text: StrictStr
    finish_reason: Any = None
    token_ids: list[Annotated[int, Field(strict=True, ge=0)]] | None = None
    logprobs: LogProbs | None = None


class Answer(BaseModel):
    """What a completion's request is answered with."""

    choices: Annotated[list[Choice], Field(min_length=1)]


class RemoteEngine(RolloutEngine):
    """A server of its own, which somebody else starts and ends."""

    def __init__(
        self,
        base_url: str,
        model: str,
        tokenizer: Encoder,
        api_key_env: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`base_url` with or without `/v1`; the key is read from the variable `api_key_env`.

        None sends OPENAI_API_KEY to OpenAI's own address, and nothing elsewhere. Raises ConfigError
        for a variable that is not set.
        """
        self.url = server_root(base_url) + COMPLETIONS
        self._model = model
        self._tokenizer = tokenizer
        self._headers = auth_headers(base_url, api_key_env)
        self._transport = transport

    @classmethod
    def from_config(cls, config: Config, replica: int) -> Self:
        """The server at `rollout.url`, the same for every replica. Raises ConfigError."""
        section = config.actor_rollout_ref
        if section.rollout.url is None:
            fix = f"{URL}=http://host:8000"
            raise ConfigError(explain(URL, "null", "a server's address", fix))
        served = section.rollout.served_model or section.model.path
        tokenizer = load_tokenizer(section.model.path)
        return cls(section.rollout.url, served, tokenizer, section.rollout.api_key_env)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue `prompt_ids`.

        Raises ConfigError when the endpoint is away or refuses, AnswerInvalid when it answers
        something else.
        """
        body = {"model": self._model, **request_body(prompt_ids, sampling)}
        try:
            async with (
                asyncio.timeout(TIMEOUT),
                httpx.AsyncClient(timeout=TIMEOUT, transport=self._transport) as http,
                http.stream("POST", self.url, json=body, headers=self._headers) as answer,
            ):
                content = await read_body(answer)
            if not answer.is_success:
                got = f"{answer.status_code} {content[:300].decode('utf-8', 'replace')}"
                raise self._unusable(ConfigError, got)
            choice = Answer.model_validate_json(content).choices[0]
        except (httpx.TransportError, TimeoutError) as error:
            raise self._unusable(ConfigError, f"{type(error).__name__}: {error}") from error
        except (httpx.DecodingError, ValueError) as error:
            raise self._unusable(AnswerInvalid, f"{type(error).__name__}: {error}") from error
        return self._completion(choice, sampling)

    def _completion(self, choice: Choice, sampling: Sampling) -> Completion:
        text = choice.text
        reason = "length" if choice.finish_reason == "length" else "stop"
        if reason == "stop":
            text += missing_stop(text, sampling.stop)
        ids = choice.token_ids
        if ids is None:
            logger.warning("%s returns no token_ids: its text is encoded again", redact(self.url))
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        given = choice.logprobs.token_logprobs if choice.logprobs else None
        log_probs = [math.nan if p is None else p for p in given or ()]
        if len(log_probs) != len(ids):
            log_probs = [math.nan] * len(ids)
        return Completion(tuple(ids), tuple(log_probs), text, reason)

    def _unusable(self, kind: type[ConfigError], got: str) -> ConfigError:
        return kind(
            explain(
                f"endpoint {self.url}",
                " ".join(got.split()),
                "a completion of token ids",
                "start an OpenAI-compatible server there (vllm serve MODEL) or correct --endpoint "
                "(of a run, rollout.url); where it wants a key, name the variable that holds it: "
                "--api-key-env (rollout.api_key_env)",
            )
        )


def server_root(base_url: str, option: str = "endpoint") -> str:
    """A server's address without the `/v1` that it may be given with. Raises ConfigError, which
    names the option, for text that is none."""
    try:
        httpx.URL(base_url)
    except httpx.InvalidURL as error:
        got, fix = f"{base_url} ({error})", "as in http://host:8000"
        raise ConfigError(explain(option, got, "a server's address", fix)) from error
    return base_url.rstrip("/").removesuffix("/v1")


def auth_headers(base_url: str, api_key_env: str | None) -> dict[str, str]:
    """What shows a server the key of the variable `api_key_env`; see `RemoteEngine`."""
    variable = api_key_env or (OPENAI_KEY if base_url.startswith(OPENAI) else "")
    key = os.environ.get(variable)
    if api_key_env and not key:
        expected, fix = "a variable that is set", f"export {api_key_env}=KEY"
        raise ConfigError(explain("api_key_env", api_key_env, expected, fix))
    return {"Authorization": f"Bearer {key}"} if key else {}


def request_body(prompt_ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
    """A request for one completion, of whichever model the server has."""
    return {
        "prompt": list(prompt_ids),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop": list(sampling.stop),
        "seed": sampling.seed,
        "logprobs": 0,
        # Extensions of vLLM; without them the stop string and the ids are restored here.
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "return_token_ids": True,
    }


async def read_body(answer: httpx.Response) -> bytes:
    """The body; raises ValueError for one that is too long."""
    content = bytearray()
    async for part in answer.aiter_bytes():
        content += part
        if len(content) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes")
    return bytes(content)


def missing_stop(text: str, stop: Sequence[str]) -> str:
    """The closing tag of `stop` that a server left off: that of the last tag still open.

    *Example*: `"<answer> Oslo"` misses `"</answer>"`; a text with its closing tag misses none.
    """
    if any(text.rstrip().endswith(tag) for tag in stop):
        return ""
    opened = {tag: text.rfind(tag.replace("</", "<")) for tag in stop}
    still_open = {tag: at for tag, at in opened.items() if at > text.rfind(tag)}
    return max(still_open, key=lambda tag: still_open[tag]) if still_open else ""
