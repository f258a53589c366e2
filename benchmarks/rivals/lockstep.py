"""Plays our dialogues with a model's own `generate`, all waiting turns in one padded call.

It is how TRL samples: the dialogues of a step advance turn by turn, and a call lasts until its
longest turn ends. It needs torch, transformers and the agent, but neither Ray nor an engine.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from verl.agent.interface import Agent
from verl.engine import RolloutEngine
from verl.rollout.stops import cut_at_stop
from verl.types import Completion, Sampling, Trajectory


class Waiting(NamedTuple):
    """A turn that a dialogue waits for."""

    prompt_ids: list[int]
    sampling: Sampling
    answer: asyncio.Future[Completion]


class Lockstep(RolloutEngine):
    """An engine that starts when every unfinished dialogue waits for it."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._waiting: list[Waiting] = []
        self._num_unfinished = 0
        self._loop = asyncio.new_event_loop()

    def play(
        self, agent: Agent, starts: Sequence[Trajectory], sampling: Sampling
    ) -> list[Trajectory]:
        """Finish `starts`, in their order, with the sampling parameters of one request."""
        return self._loop.run_until_complete(self._play(agent, starts, sampling))

    async def _play(
        self, agent: Agent, starts: Sequence[Trajectory], sampling: Sampling
    ) -> list[Trajectory]:
        self._num_unfinished = len(starts)
        return await asyncio.gather(*(self._play_one(agent, start, sampling) for start in starts))

    async def _play_one(self, agent: Agent, start: Trajectory, sampling: Sampling) -> Trajectory:
        try:
            return await agent.run(start, self, sampling)
        finally:
            self._num_unfinished -= 1
            self._sample_if_all_wait()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue `prompt_ids` together with all other dialogues."""
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(Waiting(list(prompt_ids), sampling, answer))
        self._sample_if_all_wait()
        return await answer

    def _sample_if_all_wait(self) -> None:
        if self._waiting and len(self._waiting) == self._num_unfinished:
            waiting, self._waiting = self._waiting, []
            for turn, ids in zip(waiting, self._sample(waiting), strict=True):
                turn.answer.set_result(self._completion(ids, turn.sampling))

    def _sample(self, waiting: Sequence[Waiting]) -> list[list[int]]:
        """Return the sampled ids of each turn, with padding after its end."""
        length = max(len(turn.prompt_ids) for turn in waiting)
        padding = [length - len(turn.prompt_ids) for turn in waiting]
        pad_id, sampling = self._tokenizer.pad_token_id, waiting[0].sampling
        rows = [
            [pad_id] * num + turn.prompt_ids for num, turn in zip(padding, waiting, strict=True)
        ]
        mask = [[0] * num + [1] * (length - num) for num in padding]
        choice: dict[str, Any] = {"do_sample": False}
        if sampling.temperature:
            choice = {"do_sample": True, "temperature": sampling.temperature,
                      "top_p": sampling.top_p, "top_k": 0}  # fmt: skip
        with torch.no_grad():
            ids = self._model.generate(
                input_ids=torch.tensor(rows), attention_mask=torch.tensor(mask),
                max_new_tokens=sampling.max_tokens, stop_strings=list(sampling.stop),
                pad_token_id=pad_id, tokenizer=self._tokenizer, **choice,
            )  # fmt: skip
        sampled: list[list[int]] = ids[:, length:].tolist()
        return sampled

    def _completion(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        """Cut padding off: a turn ends with a stop string, the end of sequence, or its budget."""
        ends = {self._tokenizer.eos_token_id, self._tokenizer.pad_token_id}
        kept: list[int] = []
        reason, text = "length", ""
        for token in ids:
            kept.append(token)
            text, is_stopped = cut_at_stop(self._tokenizer.decode(kept), sampling.stop)
            if is_stopped or token in ends:
                reason = "stop"
                break
        log_probs = (math.nan,) * len(kept)
        return Completion(tuple(kept), log_probs, text, reason)
