"""Starts an agent from options: checks the retriever, loads the model, starts the engine.

The retriever is contacted first, so that a wrong address fails before long work. The agent is the
same as in a training run with these options.
"""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from search_r1.inference.agent_options import AgentOptions
from search_r1.inference.dialogue import AgentSession
from search_r1.inference.model_name import at_latest_checkpoint, check_names
from search_r1.inference.retriever_facts import retriever_facts
from verl.remote_code import set_trust
from verl.types import Sampling

MAX_RETRIES = 2
"""Retries of a search; few, since a person is waiting."""


@contextlib.asynccontextmanager
async def open_session(options: AgentOptions) -> AsyncIterator[AgentSession]:
    """Start the agent and its engine, after checking the retriever. Raises UserError."""
    from search_r1.phases import phase  # noqa: PLC0415 - rich, for which --help waits

    with phase("asking the retriever"):
        await retriever_facts(options.retriever_url)
    set_trust(options.trust_remote_code)
    if not options.model:
        from search_r1.inference.default_model import with_default_model  # noqa: PLC0415 - rare

        options = with_default_model(options)
    options = at_latest_checkpoint(options)
    check_names(options)
    with phase("importing torch and transformers"):
        from search_r1.inference.building import checked_agent, run_config  # noqa: PLC0415
        from search_r1.inference.model import open_model_folder, running_engine  # noqa: PLC0415

    with contextlib.ExitStack() as stack:
        with phase(f"reading the model {options.model}"):
            folder = stack.enter_context(open_model_folder(options))
            config = run_config(options, str(folder))
            config.retriever.max_retries = MAX_RETRIES
            agent = checked_agent(config)
        tokenizer: Any = agent.tokenizer
        data = config.data
        sampling = Sampling(data.max_response_length, options.temperature, options.top_p)
        try:
            async with running_engine(config) as engine:
                longest = min(data.max_start_length, data.max_prompt_length)
                yield AgentSession(agent, engine, tokenizer, sampling, options.seed, longest,
                                   options.num_at_once)  # fmt: skip
        finally:
            await agent.environment.aclose()
