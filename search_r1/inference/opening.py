"""From options to an agent that can be asked: model, retriever and engine, opened and closed."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from search_r1.inference.dialogue import AgentSession
from search_r1.inference.model import (
    Options,
    at_last_step,
    base_of,
    computed_dtype,
    load_agent,
    model_folder,
    running_engine,
)
from search_r1.inference.options import AgentOptions
from search_r1.inference.retriever import facts_of
from search_r1.inference.settings import run_config
from verl.config import Config
from verl.errors import ModelError, explain
from verl.remote_code import set_trust
from verl.types import Sampling

ROOT = Path(__file__).resolve().parents[2]
"""The checkout, or the folder of an installed copy."""
DEMO = Path("runs/demo/model")
"""What `make demo` leaves."""
MAX_RETRIES = 2
"""Further attempts of a search: somebody is waiting."""


def with_default_model(options: Options) -> Options:
    """The options with a model where they name none.

    In a checkout that is the demo's model or the adapter that ships; elsewhere an adapter's base.
    Raises ModelError when none is known.
    """
    shipped = _checkout()
    if shipped is not None:
        chosen = shipped.with_model({"model": options.model, "adapter": options.adapter})
        options = replace(options, **chosen)
    return options if options.model else replace(options, model=default_model(options.adapter))


def _checkout() -> Any:
    """The module of what ships with a checkout of this project; None in an installed copy."""
    if not (ROOT / "example" / "smollm2" / "shipped.py").is_file():
        return None
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    return importlib.import_module("example.smollm2.shipped")


def default_model(adapter: str | None) -> str:
    """The base of an adapter, else the demo's model; raises ModelError when neither is known."""
    if adapter is not None:
        base = base_of(Path(adapter))
        if not base:
            fix = "say which with --model"
            raise ModelError(explain(f"--adapter {adapter}", "no base in it", "its base", fix))
        return base
    if not DEMO.is_dir():
        fix = "give --model a Hugging Face folder or name (in a checkout make demo trains one)"
        raise ModelError(explain(f"model {DEMO}", "no such folder", "a model", fix))
    return str(DEMO)


@contextlib.asynccontextmanager
async def opened(options: AgentOptions) -> AsyncIterator[AgentSession]:
    """The agent of these options, running; the retriever is reached before any model is loaded.

    Raises UserError for what the user can mend.
    """
    await facts_of(_retriever(Config(), options))
    set_trust(options.trust_remote_code)
    options = at_last_step(with_default_model(options))
    with _folder(options) as folder:
        config = _retriever(run_config(options, str(folder)), options)
        agent = load_agent(config)
        tokenizer: Any = agent.tokenizer
        sampling = Sampling(options.max_response_length, options.temperature, options.top_p)
        try:
            async with running_engine(config) as engine:
                longest = min(options.max_start_length, options.max_prompt_length)
                yield AgentSession(agent, engine, tokenizer, sampling, options.seed, longest,
                                   options.num_at_once)  # fmt: skip
        finally:
            await agent.environment.aclose()


def _folder(options: AgentOptions) -> contextlib.AbstractContextManager[Path]:
    return model_folder(options.model, computed_dtype(options), options.adapter)


def _retriever(config: Config, options: AgentOptions) -> Config:
    config.retriever.url = options.retriever_url
    config.retriever.max_retries = MAX_RETRIES
    return config
