"""From options to an agent that can be asked: model, retriever and engine, opened and closed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from search_r1.inference.adapter import base_of
from search_r1.inference.dialogue import Asker
from search_r1.inference.model import (
    at_last_step,
    computed_dtype,
    load_agent,
    model_folder,
    running_engine,
)
from search_r1.inference.options import AgentOptions, option, run_config
from search_r1.inference.retriever import facts_of
from verl.config import Config
from verl.errors import ModelError, explain
from verl.types import Sampling

DEMO = Path("runs/demo/model")
"""What `make demo` leaves."""
MAX_RETRIES = 2
"""Further attempts of a search: somebody is waiting."""


@dataclass(frozen=True)
class AskingOptions(AgentOptions):
    """An agent for people's questions."""

    model: str = option(
        "",
        "model folder, hub name, checkpoint global_step_N, or a run's folder for its last one; "
        "default: the adapter's base, or the demo's model",
    )
    engine: str = option("transformers", "what generates", choices=("vllm", "transformers"))
    concurrency: int = option(32, "dialogues played at once", int)

    @classmethod
    def given(cls, values: Mapping[str, Any]) -> Self:
        """As `AgentOptions.given`; raises ModelError where no model is named and none is there."""
        if values.get("model"):
            return super().given(values)
        return super().given({**values, "model": default_model(values.get("adapter"))})


def default_model(adapter: str | None) -> str:
    """The base of an adapter, else the demo's model; raises ModelError when neither is known."""
    if adapter is not None:
        base = base_of(Path(adapter))
        if not base:
            fix = "say which with --model"
            raise ModelError(explain(f"--adapter {adapter}", "no base in it", "its base", fix))
        return base
    if not DEMO.is_dir():
        fix = "run make demo, or give --model a Hugging Face folder or name"
        raise ModelError(explain(f"model {DEMO}", "no such folder", "the demo's checkpoint", fix))
    return str(DEMO)


@contextlib.asynccontextmanager
async def opened(options: AgentOptions) -> AsyncIterator[Asker]:
    """The agent of these options, running; the retriever is reached before any model is loaded.

    Raises SearchR1Error for what the user can mend.
    """
    await facts_of(_retriever(Config(), options))
    options = at_last_step(options)
    with _folder(options) as folder:
        config = _retriever(run_config(options, str(folder)), options)
        agent = load_agent(config)
        tokenizer: Any = agent.tokenizer
        sampling = Sampling(options.max_response_length, options.temperature, options.top_p)
        try:
            async with running_engine(config) as engine:
                yield Asker(agent, engine, tokenizer, sampling, options.seed,
                            options.max_start_length, options.num_at_once)  # fmt: skip
        finally:
            await agent.environment.aclose()


def _folder(options: AgentOptions) -> contextlib.AbstractContextManager[Path]:
    return model_folder(options.model, computed_dtype(options), options.adapter)


def _retriever(config: Config, options: AgentOptions) -> Config:
    config.retriever.url = options.retriever_url
    config.retriever.max_retries = MAX_RETRIES
    return config
