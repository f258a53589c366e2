"""Options of an agent: model, engine, retriever, dialogue format and token budgets."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import tyro
import yaml

from search_r1.options import Bounds, Seed, problems
from verl.config import Config
from verl.config.agent import AgentConfig
from verl.errors import ConfigError, did_you_mean, explain

AGENT_NAMES = next(field for field in fields(AgentConfig) if field.name == "name")
TURNS, DOCUMENTS = Bounds(0, 10_000), Bounds(1, 10_000)
Dialogues = Annotated[int, Bounds(1, 16_384)]
Length = Annotated[int, Bounds(1, 2**24)]


def read_template_kwargs(words: Sequence[str]) -> dict[str, Any]:
    """Read an object, as JSON or YAML, or words NAME=VALUE. Raises ConfigError.

    *Example*: `{"enable_thinking": false}`, `{enable_thinking: false}`, `enable_thinking=false`.
    """
    found: dict[str, Any] = {}
    try:
        if len(words) == 1 and words[0].lstrip().startswith("{"):
            found = _json_or_yaml(words[0])
        else:
            for word in words:
                name, equals, value = word.partition("=")
                if not equals or name in found:
                    raise ValueError(word)
                found[name] = _json_or_yaml(value)
        if not words or not all(isinstance(n, str) and n.isidentifier() for n in found):
            raise ValueError(words)
        json.dumps(found)  # it is written beside models; YAML also has dates
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        expected = "an object or NAME=VALUE, with each name once"
        fix = """--chat-template-kwargs '{"enable_thinking": false}' or enable_thinking=false"""
        got = repr(" ".join(words))[:200]
        raise ConfigError(explain("--chat-template-kwargs", got, expected, fix)) from error
    return found


def _json_or_yaml(text: str) -> Any:
    """Parse JSON, or else YAML, as options of runs are. Raises ValueError and YAMLError."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError:
        return yaml.safe_load(text)


def _unique(pairs: Sequence[tuple[str, Any]]) -> Mapping[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a repeated name")
    return dict(pairs)


COMMON = ("model", "adapter", "trust_remote_code", "retriever_url", "topk", "max_turns", "engine",
          "endpoint", "device", "temperature", "seed")  # fmt: skip
"""Flags of an agent that `--help` shows."""
TemplateKwargs = Annotated[
    dict[str, Any] | None,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="JSON|NAME=VALUE",
        instance_from_str=read_template_kwargs,
        is_instance=lambda value: value is None or isinstance(value, dict),
        str_from_instance=lambda value: ["None" if value is None else json.dumps(value)],
    ),
]


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
    do_search: bool | None = None
    """use the tools; default: true with --tools, else the model's own setting"""
    agent: str | None = None
    """dialogue, documents_first, folding, openenv:URL or FILE.py:Name, as `agent.name`; default:
    the model's own setting"""
    template: str | None = None
    """dialogue format: name or .yaml file, as in `template`; default: the model's own setting"""
    chat_template_kwargs: TemplateKwargs = None
    """arguments of the model's chat template, as enable_thinking=false; default: the model's own"""
    no_think_rl: bool | None = None
    """begin each turn with a closed thinking part; default: the model's own setting"""
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
    max_start_length: Length | None = None
    """maximum length of the initial prompt; default: the model's own setting"""
    max_prompt_length: Length | None = None
    """maximum context of any turn; together with --max-response-length at most the model's;
    default: the model's own setting"""
    max_response_length: Length | None = None
    """maximum sampled tokens per turn; default: the model's own setting"""
    max_obs_length: Length | None = None
    """maximum length of one observation; default: the model's own setting"""

    def __post_init__(self) -> None:
        """Check the options before any work. Raises ConfigError."""
        for problem in (*problems(self), *self.conflicts()):
            raise ConfigError(problem)

    def conflicts(self) -> Iterator[str]:
        """Yield problems other than values out of bounds."""
        names = AGENT_NAMES.metadata["limits"]
        if self.agent is not None and not names.allows(self.agent):
            fix = did_you_mean(self.agent, names.choices, "name one of them")
            yield explain("--agent", repr(self.agent), names.expected(), fix)
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
