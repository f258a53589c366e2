"""What opens an agent: model, engine, retriever, wording and budgets, each option in one place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from search_r1.agent.tags import NAMES
from verl.agent.wording import TEMPLATE_FILE
from verl.config import Config
from verl.errors import ConfigError, explain

SETTINGS_FILE = "search_r1.json"
"""In a model's or adapter's folder: how it was trained to talk."""

_DATA = Config().data

Check = tuple[str, object, bool, str, str]
"""An option: its name, what was got, whether that is good, what was expected, and the fix."""


def option(default: Any, words: str, kind: Callable[[str], Any] = str, **more: Any) -> Any:
    """An option: its default, its help, and what else `add_argument` should know."""
    return field(default=default, metadata={"help": words, "type": kind, **more})


@dataclass(frozen=True)
class AgentOptions:
    """The agent that is asked; lengths are in tokens."""

    model: str = option("", "model folder, hub name, checkpoint global_step_N, or a run's folder")
    adapter: str | None = option(None, "folder of a LoRA adapter over the model")
    retriever_url: str = option(
        Config().retriever.url, "search server(s), with commas between them, or: empty"
    )
    topk: int | None = option(None, "documents a search; default: the model's own", int)
    template: str | None = option(
        None, f"wording: {', '.join(NAMES)}, or a .yaml file; default: the model's own"
    )
    max_turns: int | None = option(None, "searches a dialogue; default: the model's own", int)
    temperature: float = option(0.0, "0 is greedy", float)
    top_p: float = option(1.0, "nucleus bound", float)
    seed: int | None = option(None, "makes sampling repeatable; default: another every time", int)
    engine: str = option("vllm", "what generates", choices=("vllm", "transformers"))
    endpoint: str | None = option(None, "OpenAI-compatible server that generates instead")
    served_model: str | None = option(None, "the model's name at --endpoint; default: --model")
    device: str = option("auto", "auto, cpu or cuda", choices=("auto", "cpu", "cuda"))
    dtype: str = option("auto", "auto, bfloat16, float16 or float32",
                        choices=("auto", "bfloat16", "float16", "float32"))  # fmt: skip
    tensor_parallel_size: int = option(1, "GPUs of the engine", int)
    gpu_memory_utilization: float = option(0.85, "share of a GPU's memory for vLLM", float)
    concurrency: int = option(256, "dialogues played at once", int)
    max_start_length: int = option(_DATA.max_start_length, "longest prompt that is accepted", int)
    max_prompt_length: int = option(_DATA.max_prompt_length, "context at any turn", int)
    max_response_length: int = option(_DATA.max_response_length, "what one turn may sample", int)
    max_obs_length: int = option(_DATA.max_obs_length, "one observation", int)

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, before any work."""
        for name, got, is_good, expected, fix in self.checks():
            if not is_good:
                raise ConfigError(explain(f"--{name.replace('_', '-')}", got, expected, fix))

    def checks(self) -> Iterator[Check]:
        """What every option must fulfil."""
        yield "model", self.model, bool(self.model), "a model", (
            "name a folder, hub name or checkpoint")  # fmt: skip
        yield "adapter", "both --adapter and --endpoint", not (self.adapter and self.endpoint), (
            "one of them"), "give the adapter to the server behind --endpoint"  # fmt: skip
        yield "temperature", self.temperature, self.temperature >= 0, "0 or more", "--temperature 0"
        yield "top_p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1", "--top-p 1"
        yield "topk", self.topk, self.topk is None or self.topk >= 1, "1 or more", "--topk 3"
        yield "max_turns", self.max_turns, self.max_turns is None or self.max_turns >= 0, (
            "0 or more"), "--max-turns 4"  # fmt: skip
        yield "concurrency", self.concurrency, self.concurrency >= 1, (
            "1 or more"), "--concurrency 64"  # fmt: skip

    @property
    def num_at_once(self) -> int:
        """Dialogues in the engine: the transformers engine has one key-value cache, so one."""
        is_alone = self.engine == "transformers" and not self.endpoint
        return 1 if is_alone else self.concurrency

    @classmethod
    def arguments(cls) -> list[tuple[str, dict[str, Any]]]:
        """Each option as name and arguments of `ArgumentParser.add_argument`, defaults left out."""
        return [
            (f"--{f.name.replace('_', '-')}", {"dest": f.name, **f.metadata}) for f in fields(cls)
        ]

    @classmethod
    def given(cls, values: Mapping[str, Any]) -> Self:
        """The options that a command line gave; lists become tuples. Raises ConfigError."""
        options: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in values.items()
        }
        return cls(**options)


def run_config(options: AgentOptions, model: str) -> Config:
    """The options of a training run under which the agent is the run's own.

    `model` is the folder of the weights. What the model's folder says of its dialogue
    (`search_r1.json`, written by training) holds where the options say nothing.
    """
    config, own = Config(), _own_settings(model)
    config.actor_rollout_ref.model.path = model
    config.template = _first(options.template, _own_template(model, own), config.template)
    config.agent.tools = list(own.get("tools", config.agent.tools))
    config.max_turns = _first(options.max_turns, own.get("max_turns"), config.max_turns)
    config.retriever.topk = _first(options.topk, own.get("topk"), config.retriever.topk)
    config.retriever.url = options.retriever_url
    for name in ("max_start_length", "max_prompt_length", "max_response_length", "max_obs_length"):
        setattr(config.data, name, getattr(options, name))
    config.trainer.device = options.device
    config.trainer.seed = options.seed or 0
    rollout = config.actor_rollout_ref.rollout
    rollout.name = "remote" if options.endpoint else options.engine
    rollout.url, rollout.served_model = options.endpoint, options.served_model or options.model
    rollout.dtype = options.dtype
    rollout.max_num_seqs = options.concurrency
    rollout.tensor_model_parallel_size = options.tensor_parallel_size
    rollout.gpu_memory_utilization = options.gpu_memory_utilization
    return config


def _own_settings(model: str) -> dict[str, Any]:
    """What `search_r1.json` of a model's folder says; nothing where there is none."""
    file = Path(model) / SETTINGS_FILE
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _own_template(model: str, own: Mapping[str, Any]) -> str | None:
    """What the model's folder says of its wording, which may be a file in there."""
    template = own.get("template")
    return str(Path(model) / TEMPLATE_FILE) if template == TEMPLATE_FILE else template


def _first(*values: Any) -> Any:
    """The first value that is not None."""
    return next(value for value in values if value is not None)
