"""Options that open an agent: model, engine, retriever, wording and budgets."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from search_r1.options import Bounds, Seed, problems
from verl.config import Config
from verl.errors import ConfigError, explain

SETTINGS_FILE = "search_r1.json"
"""In a model's or adapter's folder: how it was trained to talk."""

_DATA = Config().data
TURNS, DOCUMENTS = Bounds(0, 10_000), Bounds(1, 10_000)
Dialogues = Annotated[int, Bounds(1, 16_384)]
Length = Annotated[int, Bounds(1, 2**24)]


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """The agent that is asked; lengths are in tokens."""

    model: str = ""
    """model folder, hub name, checkpoint global_step_N, or a run's folder for its last one"""
    trust_remote_code: bool = False
    """run the code that the model's folder brings, tools in files included"""
    adapter: str | None = None
    """folder of a LoRA adapter over the model"""
    retriever_url: str = Config().retriever.url
    """search server(s), with commas between them, or: empty"""
    topk: Annotated[int, DOCUMENTS] | None = None
    """documents a search; default: the model's own"""
    tools: tuple[str, ...] | None = None
    """what the policy may call, as of `agent.tools`; default: the model's own"""
    template: str | None = None
    """wording: a name, or a .yaml file, as of `template`; default: the model's own"""
    max_turns: Annotated[int, TURNS] | None = None
    """searches a dialogue; default: the model's own"""
    temperature: Annotated[float, Bounds(0, 10)] = 0.0
    """0 is greedy"""
    top_p: Annotated[float, Bounds(gt=0, le=1)] = 1.0
    """nucleus bound"""
    seed: Seed | None = None
    """makes sampling repeatable; default: another every time"""
    engine: Literal["vllm", "transformers"] = "vllm"
    """what generates"""
    endpoint: str | None = None
    """OpenAI-compatible server that generates instead"""
    served_model: str | None = None
    """the model's name at --endpoint; default: --model"""
    api_key_env: str | None = None
    """variable with its key; default: OPENAI_API_KEY, for api.openai.com alone"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the engine computes"""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """what the engine computes in"""
    tensor_parallel_size: Annotated[int, Bounds(1)] = 1
    """GPUs of the engine"""
    gpu_memory_utilization: Annotated[float, Bounds(gt=0, le=1)] = 0.85
    """share of a GPU's memory for vLLM"""
    concurrency: Dialogues = 256
    """dialogues at once"""
    max_start_length: Length = _DATA.max_start_length
    """longest prompt that is accepted"""
    max_prompt_length: Length = _DATA.max_prompt_length
    """context at any turn; with --max-response-length no more than the model's"""
    max_response_length: Length = _DATA.max_response_length
    """what one turn may sample"""
    max_obs_length: Length = _DATA.max_obs_length
    """one observation"""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, before any work."""
        for problem in (*problems(self), *self.conflicts()):
            raise ConfigError(problem)

    def conflicts(self) -> Iterator[str]:
        """What is wrong beside numbers out of bounds."""
        if self.adapter and self.endpoint:
            fix = "give the adapter to the server behind --endpoint"
            yield explain("--adapter", "both --adapter and --endpoint", "one of them", fix)
        if self.endpoint is not None and not _is_http(self.endpoint):
            fix = "--endpoint http://HOST:PORT, or leave it out"
            yield explain("--endpoint", repr(self.endpoint), "http:// or https:// and a host", fix)
        for name, what in {"served_model": "model", "api_key_env": "key"}.items():
            value, flag = getattr(self, name), f"--{name.replace('_', '-')}"
            if value is not None and not (value.strip() and self.endpoint):
                got = "no --endpoint" if value.strip() else "an empty one"
                fix = f"leave it out, or give --endpoint and the {what}"
                yield explain(flag, got, f"the server whose {what} it is", fix)
        if self.tensor_parallel_size > 1 and (self.engine != "vllm" or self.endpoint):
            fix = "--engine vllm, or leave it out"
            got = "an endpoint" if self.endpoint else self.engine
            yield explain("--tensor-parallel-size", got, "vllm, which alone divides a model", fix)

    @property
    def num_at_once(self) -> int:
        """Dialogues in the engine: the transformers engine has one key-value cache, so one."""
        is_alone = self.engine == "transformers" and not self.endpoint
        return 1 if is_alone else self.concurrency


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        if any(not letter.isprintable() or letter.isspace() for letter in url):
            return False
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        return False


@dataclass(frozen=True, kw_only=True)
class InferenceOptions(AgentOptions):
    """An agent for people's questions; without a model or adapter the shipped one is taken."""

    engine: Literal["vllm", "transformers"] = "transformers"
    """what generates"""
    concurrency: Dialogues = 32
    """dialogues at once"""
