"""`actor.terms.teacher`: distils the policy from another model, on the policy's own trajectories.

The teacher is served elsewhere (`vllm serve MODEL`) and scores the tokens that were sampled, as a
prompt; it must have the policy's tokenizer. DGPO (arXiv 2508.20324) asks it about wrong
trajectories only, which is the default here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import httpx
import torch

from verl.config import Config
from verl.config.terms import TEACHER, Teacher
from verl.errors import (
    ConfigError,
    ToolOutage,
    ToolRefused,
    UserError,
    explain,
    redact,
    shortened,
)
from verl.ext.distillation import DistillationTerm, begin_own, targets
from verl.ext.engines.remote import (
    COMPLETIONS,
    CompletionResponse,
    auth_headers,
    request_body,
    server_root,
)
from verl.proxies import client_settings
from verl.trainer.collect import Samples
from verl.types import Sampling

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer

logger = logging.getLogger(__name__)

TIMEOUT_S, CHECK_S = 600.0, 2.0
PAUSES = (1.0, 4.0, 15.0, 60.0)
"""Seconds between the attempts of a request."""
TRANSIENT = (408, 425, 429)
"""Statuses of refusals after which another attempt may succeed."""
NUM_REQUESTS = 16
PROBE = " The capital of Norway is Oslo.\n<answer> 3 </answer>"
Sleep = Callable[[float], Awaitable[None]]


class TeacherServer:
    """The teacher's log-probs of token ids, from a server with `prompt_logprobs` as vLLM's."""

    def __init__(
        self, teacher: Teacher, transport: httpx.AsyncBaseTransport | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:  # fmt: skip
        """`transport` and `sleep` replace the network and the clock in tests."""
        self.url = server_root(teacher.url, f"{TEACHER}.url")
        self._model, self._sleep, self._transport = teacher.served_model, sleep, transport
        self._headers = auth_headers(teacher.url, teacher.api_key_env)

    def check(self, tokenizer: Any) -> None:
        """Score a short text, encoded by both sides. Raises ConfigError if they differ."""
        ids = tokenizer.encode(PROBE, add_special_tokens=False)
        body = {"model": self._model, "prompt": PROBE, "add_special_tokens": False}
        try:
            encoded, _ = asyncio.run(self._probe(body, ids))
        except (httpx.HTTPError, ToolRefused, ValueError, LookupError, TypeError) as error:
            got = f"{type(error).__name__} {redact(str(error))}"
            raise self._error(got, "a server of vLLM that scores prompts") from error
        if encoded != ids:
            got = f"{len(encoded)} other ids than the policy's {len(ids)} for {PROBE!r}"
            raise self._error(got, "the policy's tokenizer") from None

    def score(self, dialogues: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-prob of each id after the first.

        Raises ToolOutage after all attempts, and ToolRefused at once if the server refuses.
        """
        return asyncio.run(self._score_all(dialogues))

    async def _probe(
        self, body: Mapping[str, Any], ids: Sequence[int]
    ) -> tuple[list[int], list[float]]:
        async with self._client(CHECK_S) as client:
            answer = await client.post("/tokenize", json=body)
            answer.raise_for_status()
            return list(answer.json()["tokens"]), await self._score(client, ids)

    async def _score_all(self, dialogues: Sequence[Sequence[int]]) -> list[list[float]]:
        slots = asyncio.Semaphore(NUM_REQUESTS)
        async with self._client(TIMEOUT_S) as client:  # the first error, not a group of them
            return await asyncio.gather(*(self._patiently(client, slots, d) for d in dialogues))

    async def _patiently(
        self, client: httpx.AsyncClient, slots: asyncio.Semaphore, ids: Sequence[int]
    ) -> list[float]:
        async with slots:
            for pause in (*PAUSES, None):
                try:
                    return await self._score(client, ids)
                except (httpx.HTTPError, ValueError, LookupError) as error:
                    reason = f"{type(error).__name__} {redact(str(error))}"
                    if pause is None:
                        got, fix = reason, "start the server again, and the run as before"
                        problem = explain(f"teacher {redact(self.url)}", got, "log-probs", fix)
                        raise ToolOutage(problem) from error
                    logger.warning("teacher: %s; again in %g s", reason, pause)
                    await self._sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    async def _score(self, client: httpx.AsyncClient, ids: Sequence[int]) -> list[float]:
        body = {"model": self._model, **request_body(ids, Sampling(1, temperature=0.0))}
        answer = await client.post(COMPLETIONS, json=body | {"prompt_logprobs": 0})
        if answer.is_client_error and answer.status_code not in TRANSIENT:
            got = f"{answer.status_code} {shortened(answer.text, 200)}"
            fix = (
                "serve it with a --max-model-len that the dialogues fit in, or correct its settings"
            )
            raise ToolRefused(explain(f"teacher {redact(self.url)}", got, "log-probs", fix))
        answer.raise_for_status()
        rows = CompletionResponse.model_validate_json(answer.content).choices[0].prompt_logprobs
        if rows is None or len(rows) != len(ids):
            raise ValueError("an answer without prompt_logprobs")
        return [(row or {})[str(i)].logprob for row, i in zip(rows[1:], ids[1:], strict=True)]

    def _client(self, timeout: float) -> httpx.AsyncClient:
        settings = client_settings(self.url) | {"headers": self._headers}
        return httpx.AsyncClient(
            base_url=self.url, timeout=timeout, transport=self._transport, **settings
        )

    def _error(self, got: str, expected: str) -> UserError:
        fix = (
            f"vllm serve MODEL with the policy's tokenizer, and its name as {TEACHER}.served_model"
        )
        return ConfigError(explain(f"{TEACHER}.url ({redact(self.url)})", got, expected, fix))


class TeacherModel(DistillationTerm):
    """Has a model on a server as teacher."""

    name = "teacher"

    def __init__(self, coef: float, server: TeacherServer, asks_all: bool) -> None:
        """`asks_all`: about right trajectories too."""
        super().__init__(coef)
        self._server, self._asks_all = server, asks_all

    def teach(self, trainer: RayPPOTrainer) -> None:
        """Subtract the log-ratio to the teacher. Raises ConfigError if no outcome is known."""
        batch = trainer.current.batch
        assert batch is not None, "a prepared step has a batch"
        self.check_rows(batch)
        chosen = self._chosen(trainer.current.samples)
        self.note_share(chosen, batch)
        if not chosen:
            return
        students = batch.select(chosen)
        own = begin_own(trainer, students)  # meanwhile the teacher is asked
        dialogues = [ids.tolist() for ids in students.sequences("input_ids")]
        theirs = torch.cat([torch.tensor([0.0, *one]) for one in self._server.score(dialogues)])
        self.subtract(batch, chosen, own(), theirs, targets(students))

    def _chosen(self, samples: Samples) -> list[int]:
        """Return the trajectories to ask about."""
        if self._asks_all:
            return list(range(len(samples.trajectories)))
        self.check_outcomes(samples)
        return [i for i, reward in enumerate(samples.rewards) if not reward.is_right]


def prepare(config: Config, tokenizer: Any, step: int, total_steps: int) -> None:
    """Check that a run's teacher answers and encodes as the policy does. Raises ConfigError."""
    actor = config.actor_rollout_ref.actor
    if actor.terms.get("teacher") and not config.trainer.val_only:
        TeacherServer(Teacher.of(actor.teacher)).check(tokenizer)


def hook(parts: Parts) -> TeacherModel | None:
    """Return the hook of a run with the term."""
    actor = parts.config.actor_rollout_ref.actor
    if not (coef := actor.terms.get("teacher", 0.0)):
        return None
    teacher = Teacher.of(actor.teacher)
    return TeacherModel(coef, TeacherServer(teacher), teacher.trajectories == "all")
