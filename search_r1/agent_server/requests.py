"""Parses and validates chat completion requests.

Unsupported fields that would change the answer are refused, and so are misspelt ones; other unknown
fields are ignored, with a warning for each name. `null` is the default of every field.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import HTTPException
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from search_r1.agent_server.responses import ApiError
from search_r1.inference.dialogue import AgentSession
from search_r1.retrieval.errors import DeadlineExceeded
from search_r1.retrieval.schema import well_formed
from search_r1.retrieval.service.requests import parse, read_body
from search_r1.retrieval.service.unknown_fields import misspelt_fields
from verl.errors import DataError, PromptTooLong
from verl.types import Prompt, Sampling

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([],),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "modalities": (["text"],),
    "audio": (),
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "prompt_logprobs": (False,),
    "top_logprobs": (0,),
    "tool_choice": ("auto", "none"),
    "function_call": ("auto", "none"),
    "prediction": (),
    "reasoning_effort": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Unsupported fields, with the values (besides null) that are still accepted."""
HARMLESS = ("models", "streaming", "include_obfuscation")
"""Fields of other servers that look like ours, and change no answer."""
MAX_WARNED = 100
"""Names of ignored fields to warn of; clients may invent more."""
BODY_TIMEOUT_S = 60.0
"""Maximum seconds for a request body to arrive."""


logger = logging.getLogger(__name__)
_warned: set[str] = set()


class Part(BaseModel):
    type: str
    text: str = ""


Text = str | Annotated[list[Part], Field(fail_fast=True)] | None
"""Content of a message."""


class ChatMessage(BaseModel):
    """One message; fields other than role and content are ignored."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text = None


class StreamOptions(BaseModel):
    """Optional contents of a stream."""

    model_config = ConfigDict(extra="allow")  # to find misspelt fields

    include_usage: bool | None = None
    include_documents: bool | None = None
    """Search-R1 extension: send the texts of the documents after each search."""


class ChatRequest(BaseModel):
    """`POST /v1/chat/completions`."""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)


@dataclass(frozen=True)
class AgentRequest:
    """A validated request in terms of the agent."""

    question: str
    prompt: Prompt
    sampling: Sampling
    seed: int | None
    max_tokens: int | None
    """Maximum number of tokens that the policy may sample in all turns together."""
    stream_options: StreamOptions


async def read_request(request: Request, max_bytes: int) -> ChatRequest:
    """Read and parse a request. Raises ApiError for its first mistake, or ClientDisconnect."""
    try:
        return parse(await read_body(request, max_bytes, BODY_TIMEOUT_S), ChatRequest)
    except DeadlineExceeded as error:
        raise ApiError(408, str(error)) from error
    except HTTPException as error:
        if isinstance(error.detail, str):
            raise ApiError(error.status_code, error.detail) from error
        first: dict[str, Any] = error.detail[0]
        param = ".".join(str(part) for part in first["loc"] if part != "body")
        message = f"{param or 'body'}: {first['msg']}"
        raise ApiError(400, message, param=param or None) from error


def to_agent_request(body: ChatRequest, session: AgentSession) -> AgentRequest:
    """Validate a request and render its prompt. Raises ApiError for unsupported requests."""
    for name, value in (body.model_extra or {}).items():
        if name in UNSUPPORTED and value is not None and value not in UNSUPPORTED[name]:
            message = f"{name} is not supported by a search agent: leave it out"
            raise ApiError(400, message, "unsupported_parameter", name)
    for request in filter(None, (body, body.stream_options)):
        for name, fix in misspelt_fields(request, (*UNSUPPORTED, *HARMLESS)).items():
            raise ApiError(400, f"{name}: {fix}", "unknown_parameter", name)
        warn_of_ignored(request.model_extra or {})
    *before, last = body.messages
    if last.role != "user":
        message = f"the last message is of role {last.role}, expected user"
        raise ApiError(400, message, param="messages")
    question = text_of(last.content)
    if not question.strip():
        raise ApiError(400, "the last message is empty, expected a question", param="messages")
    # `developer` is OpenAI's newer name for `system`, but chat templates only know `system`.
    earlier = tuple(
        {"role": "system" if m.role == "developer" else m.role, "content": text_of(m.content)}
        for m in before
    )
    try:
        prompt = session.prompt(question, earlier)
    except DataError as error:
        code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
        raise ApiError(400, str(error), code, "messages") from error
    chosen = body.model_dump(include={"temperature", "top_p"}, exclude_none=True)
    return AgentRequest(
        question,
        prompt,
        replace(session.sampling, **chosen),
        body.seed,
        body.max_completion_tokens or body.max_tokens,
        body.stream_options or StreamOptions(),
    )


def warn_of_ignored(fields: Mapping[str, Any]) -> None:
    """Log the names of fields that change nothing here, each once."""
    for name in fields.keys() - UNSUPPORTED.keys() - _warned:
        if fields[name] is not None and len(_warned) < MAX_WARNED:
            _warned.add(name)
            logger.warning("requests have the field %.80s, which is ignored", name)


def text_of(content: Text, where: str = "", code: str = "unsupported_content") -> str:
    """Return the text of a message. Raises ApiError for images and other content.

    `where`: the message, for the error; `code`: the error's code.
    """
    if content is None or isinstance(content, str):
        return well_formed(content or "")
    for part in content:
        if part.type != "text":
            text = f"{where}content of type {part.type}, expected text"
            raise ApiError(400, text, code, "messages")
    return well_formed("\n".join(part.text for part in content))
