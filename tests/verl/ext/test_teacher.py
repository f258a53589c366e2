"""Distillation from a served model: what is asked, the advantages, and a server that fails."""

import json
from typing import Any

import httpx
import pytest
import torch

from example.tiny import tiny_llama
from tests.core.batches import make_groups
from tests.verl.ext.test_sibling import trainer_of
from tests.verl.training.ranks import VOCAB
from tests.verl.training.test_actor import plain_log_probs
from verl.batch import ROW_STARTS, TokenBatch
from verl.config import Config
from verl.config.terms import TEACHER, Teacher, teacher_problems
from verl.errors import ConfigError, ToolOutage, ToolRefused
from verl.ext.teacher import PAUSES, TeacherModel, TeacherServer, prepare

SETTINGS = Teacher("http://teacher:8000/v1", "large")


class Server:
    """A teacher with the log-probs of a model, after a number of failures."""

    def __init__(self, failures: int = 0, status: int = 503, **changes: Any) -> None:
        self.lm = tiny_llama(VOCAB, seed=7)
        self.failures, self.status, self.changes = failures, status, changes
        self.asked: list[list[int]] = []
        self.pauses: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert body["model"] == "large"
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": [*map(ord, body["prompt"])]} | self.changes)
        if self.failures:
            self.failures -= 1
            return httpx.Response(self.status)
        self.asked.append(body["prompt"])
        pairs = zip(body["prompt"][1:], self.log_probs(body["prompt"]), strict=True)
        rows = [None, *({str(i): {"logprob": p}} for i, p in pairs)]
        choice = {"text": "", "prompt_logprobs": rows} | self.changes
        return httpx.Response(200, json={"choices": [choice]})

    def log_probs(self, ids: list[int]) -> list[float]:
        alone = TokenBatch(torch.tensor([0, len(ids)]), {"input_ids": torch.tensor(ids) % VOCAB})
        return plain_log_probs(self.lm, alone)[0].tolist()[1:]

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def client(self) -> TeacherServer:
        return TeacherServer(SETTINGS, httpx.MockTransport(self), self.sleep)


class Characters:
    """A tokenizer of characters."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [*map(ord, text)]


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("old", ["recompute", "engine"])
@pytest.mark.parametrize("asks_all", [False, True])
def test_advantages_equal_plain_transformers(old: str, asks_all: bool) -> None:
    """Wrong trajectories, or all, get the log-ratio to the teacher; all other advantages stay."""
    batch, server = make_groups([(7, [5, 3]), (9, [3, 8])]), Server()
    tokens = batch.tokens
    tokens["loss_mask"] = tokens["response_mask"]
    before, (own, _) = tokens["advantages"].clone(), plain_log_probs(tiny_llama(VOCAB), batch)
    if old == "recompute":
        tokens["old_log_probs"] = own.detach()
    hook, metrics = TeacherModel(0.25, server.client(), asks_all), dict[str, float]()
    with hook.during("prepare", trainer_of(batch, [[True, False], [False, True]], old)):
        pass
    hook.on_trained(None, metrics)  # type: ignore[arg-type]
    expected, ratios = before.clone(), []
    chosen = [0, 1, 2, 3] if asks_all else [1, 2]
    for span in batch.spans(chosen):
        theirs = torch.tensor([0.0, *server.log_probs(tokens["input_ids"][span].tolist())])
        mask = tokens["policy_mask"][span] & tokens["loss_mask"][span]
        ratio = (own[span] - theirs).detach()
        expected[span] -= 0.25 * torch.where(mask, ratio, 0.0)
        ratios.append(ratio[mask])
    torch.testing.assert_close(tokens["advantages"], expected, rtol=1e-4, atol=1e-5)
    assert len(server.asked) == len(chosen)
    assert metrics["rollout/teacher_share"] == len(chosen) / 4
    assert metrics["rollout/teacher_kl"] == pytest.approx(float(torch.cat(ratios).mean()), rel=1e-3)


def test_what_cannot_be_distilled_is_refused() -> None:
    """A reward without outcomes, and episodes of several rows."""
    batch, model = make_groups([(3, [2, 2])]), TeacherModel(0.1, Server().client(), False)
    with pytest.raises(ConfigError, match="is_right"):
        model.teach(trainer_of(batch, [[None, None]], "engine"))
    batch.tokens[ROW_STARTS] = torch.zeros(len(batch.tokens["input_ids"]), dtype=torch.bool)
    with pytest.raises(ConfigError, match="several rows"):
        model.teach(trainer_of(batch, [[False, False]], "engine"))


def test_a_failing_server_is_asked_again_and_then_ends_the_run() -> None:
    """Each request is repeated with growing pauses; the run is saved by the error's type."""
    server = Server(failures=2)
    assert server.client().score([[5, 6, 7]]) == [pytest.approx(server.log_probs([5, 6, 7]))]
    assert server.pauses == [*PAUSES[:2]]
    with pytest.raises(ToolOutage):
        Server(failures=99).client().score([[5, 6], [7, 8]])


def test_a_request_that_is_refused_is_not_repeated() -> None:
    """As one longer than the server's limit, which would be refused again."""
    server = Server(failures=1, status=400)
    with pytest.raises(ToolRefused):
        server.client().score([[5, 6, 7]])
    assert server.pauses == []


@pytest.mark.parametrize(
    ("changes", "is_fit"),
    [
        ({}, True),
        ({"tokens": [1, 2]}, False),
        ({"prompt_logprobs": None}, False),
        ({"tokens": 3}, False),
    ],
    ids=str,
)
def test_the_teacher_is_checked_before_the_run(changes: dict[str, Any], is_fit: bool) -> None:
    """Another tokenizer, and a server that does not score prompts, are refused at the start."""
    client = Server(**changes).client()
    if is_fit:
        client.check(Characters())
        return
    with pytest.raises(ConfigError) as caught:
        client.check(Characters())
    assert TEACHER in str(caught.value)


def test_only_runs_that_train_ask_the_teacher() -> None:
    """A validation alone needs no teacher: its server may be gone."""
    config = Config()
    config.actor_rollout_ref.actor.terms = {"teacher": 0.1}
    config.actor_rollout_ref.actor.teacher = {"url": "http://127.0.0.1:9", "served_model": "large"}
    with pytest.raises(ConfigError):
        prepare(config, Characters(), 0, 1)
    config.trainer.val_only = True
    prepare(config, Characters(), 0, 1)


@pytest.mark.parametrize(
    ("terms", "given", "named"),
    [
        ({}, {}, []),
        ({"teacher": 0.1}, {"url": "http://h", "served_model": "m"}, []),
        ({"teacher": 0.1}, {"url": "http://h"}, [TEACHER]),
        ({}, {"url": "http://h", "served_model": "m"}, ["terms.teacher"]),
        ({"teacher": 1}, {"url": "http://h", "served_model": 3, "trajectories": "right", "ur": "x"},
         ["served_model", "ur", "trajectories"]),
    ],
    ids=str,
)  # fmt: skip
def test_settings_of_a_teacher(
    terms: dict[str, Any], given: dict[str, Any], named: list[str]
) -> None:
    """Unknown, missing and ineffective settings are named."""
    found = list(teacher_problems(terms, given))
    assert len(found) == len(named)
    assert all(any(name in text for text in found) for name in named)
