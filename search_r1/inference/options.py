"""Options of an agent: model, engine, retriever, dialogue format and token budgets."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from search_r1.options import Bounds, Seed, problems
from verl.config import Config
from verl.errors import ConfigError, explain

SETTINGS_FILE = "search_r1.json"
"""File in a model's or adapter's folder with the dialogue settings it was trained with."""

_DATA = Config().data
TURNS, DOCUMENTS = Bounds(0, 10_000), Bounds(1, 10_000)
Dialogues = Annotated[int, Bounds(1, 16_384)]
Length = Annotated[int, Bounds(1, 2**24)]


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """The agent to run; lengths are in tokens."""

    model: str = ""
    """model folder, hub name, checkpoint global_step_N, or run folder for its latest checkpoint"""
    trust_remote_code: bool = False
    """run code from the model's folder, including its tools"""
    adapter: str | None = None
    """folder of a LoRA adapter over the model"""
    retriever_url: str = Config().retriever.url
    """retrieval server(s), separated by commas, or: empty"""
    topk: Annotated[int, DOCUMENTS] | None = None
    """documents per search; default: the model's own setting"""
    tools: tuple[str, ...] | None = None
    """tools that the policy may call, as in `agent.tools`; default: the model's own setting"""
    template: str | None = None
    """dialogue format: name or .yaml file, as in `template`; default: the model's own setting"""
    max_turns: Annotated[int, TURNS] | None = None
    """maximum searches per dialogue; default: the model's own setting"""
    temperature: Annotated[float, Bounds(0, 10)] = 0.0
    """sampling temperature; 0 is greedy"""
    top_p: Annotated[float, Bounds(gt=0, le=1)] = 1.0
    """nucleus sampling probability"""
    seed: Seed | None = None
    """makes sampling reproducible; default: a new seed every time"""
    engine: Literal["vllm", "transformers"] = "vllm"
    """library that generates"""
    endpoint: str | None = None
    """OpenAI-compatible server that generates instead"""
    served_model: str | None = None
    """the model's name at --endpoint; default: --model"""
    api_key_env: str | None = None
    """variable with the endpoint's key; default: OPENAI_API_KEY, for api.openai.com only"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device of the engine"""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """number format of the engine"""
    tensor_parallel_size: Annotated[int, Bounds(1)] = 1
    """number of GPUs over which the engine splits the model"""
    gpu_memory_utilization: Annotated[float, Bounds(gt=0, le=1)] = 0.85
    """fraction of each GPU's memory for vLLM"""
    concurrency: Dialogues = 256
    """maximum concurrent dialogues"""
    max_start_length: Length = _DATA.max_start_length
    """maximum length of the initial prompt"""
    max_prompt_length: Length = _DATA.max_prompt_length
    """maximum context of any turn; together with --max-response-length at most the model's"""
    max_response_length: Length = _DATA.max_response_length
    """maximum sampled tokens per turn"""
    max_obs_length: Length = _DATA.max_obs_length
    """maximum length of one observation"""

    def __post_init__(self) -> None:
        """Check the options before any work. Raises ConfigError."""
        for problem in (*problems(self), *self.conflicts()):
            raise ConfigError(problem)

    def conflicts(self) -> Iterator[str]:
        """Yield problems other than values out of bounds."""
        if self.adapter and self.endpoint:
            fix = "give the adapter to the server behind --endpoint"
            yield explain("--adapter", "both --adapter and --endpoint", "one of them", fix)
        if self.endpoint is not None and not _is_http(self.endpoint):
            fix = "--endpoint http://HOST:PORT, or leave it out"
            yield explain("--endpoint", repr(self.endpoint), "http:// or https:// and a host", fix)
        for name, noun in {"served_model": "model", "api_key_env": "key"}.items():
            value, flag = getattr(self, name), f"--{name.replace('_', '-')}"
            if value is not None and not (value.strip() and self.endpoint):
                got = "no --endpoint" if value.strip() else "an empty value"
                fix = f"leave it out, or give --endpoint and the {noun}"
                yield explain(flag, got, f"the server that the {noun} belongs to", fix)
        if self.tensor_parallel_size > 1 and (self.engine != "vllm" or self.endpoint):
            fix = "--engine vllm, or leave it out"
            got = "an endpoint" if self.endpoint else self.engine
            expected = "vllm, the only engine that splits a model"
            yield explain("--tensor-parallel-size", got, expected, fix)

    @property
    def num_at_once(self) -> int:
        """Maximum number of concurrent dialogues; 1 for transformers, which has one KV cache."""
        is_sequential = self.engine == "transformers" and not self.endpoint
        return 1 if is_sequential else self.concurrency


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        if any(not letter.isprintable() or letter.isspace() for letter in url):
            return False
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port
        return False


@dataclass(frozen=True, kw_only=True)
class InferenceOptions(AgentOptions):
    """An agent for interactive use; without a model or adapter the shipped one is used."""

    engine: Literal["vllm", "transformers"] = "transformers"
    """library that generates"""
    concurrency: Dialogues = 32
    """maximum concurrent dialogues"""
