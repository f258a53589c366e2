"""The transformers engine: log-probs, cache, stop strings and sampling."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from example.model import load_tokenizer
from example.tiny import tiny_llama
from tests.fakes import EOS, ByteTokenizer
from verl.errors import ModelError
from verl.ext.engines.request import processed_log_probs
from verl.ext.engines.transformers import TransformersEngine
from verl.rollout.stops import cut_at_stop
from verl.types import Completion, Sampling

PROMPT = list(b"Who is it?")


class Latin(ByteTokenizer):
    """A byte tokenizer that decodes any bytes, since a random model samples all of them."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join("<eos>" if i == EOS else chr(i) for i in ids)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A byte-level model."""
    return tiny_llama(258, eos_token_id=EOS)


def engine_of(model: LlamaForCausalLM) -> TransformersEngine:
    """Return a started engine with this model."""
    engine = TransformersEngine("", "cpu", "float32")
    engine.model, engine.tokenizer = model, Latin()
    return engine


def generate(engine: TransformersEngine, ids: list[int], sampling: Sampling) -> Completion:
    return asyncio.run(engine.generate(ids, sampling))


def own_log_probs(model: Any, context: list[int], got: Completion) -> list[float]:
    """Return the log-probs of the sampled ids by a forward pass over the whole sequence alone."""
    ids = [*context, *got.ids]
    with torch.no_grad():
        rows = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    return [float(rows[n - 1, ids[n]]) for n in range(len(context), len(ids))]


def test_log_probs_are_those_of_a_forward_pass_without_cache(model: LlamaForCausalLM) -> None:
    """For two turns that share the cache, and for a prompt that starts differently."""
    engine = engine_of(model)
    first = generate(engine, PROMPT, Sampling(6, seed=1))
    second_prompt = [*PROMPT, *first.ids, *b" and then?"]
    for prompt in (second_prompt, list(b"Another"), PROMPT):
        got = generate(engine, prompt, Sampling(6, seed=2))
        assert got.log_probs == pytest.approx(own_log_probs(model, prompt, got), abs=1e-4)


def test_a_cancelled_request_stops_sampling_and_streaming(model: LlamaForCausalLM) -> None:
    """The thread ends long before the limit, and the next request is not affected."""
    texts: list[str] = []
    engine, before = engine_of(model), set(threading.enumerate())
    endless = Sampling(1_000_000, seed=3)

    async def play() -> Completion:
        started = asyncio.Event()

        def listen(text: str) -> None:
            texts.append(text)
            started.set()

        task = asyncio.create_task(engine.stream(PROMPT, endless, listen))
        await started.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        count = len(texts)
        completion = await engine.generate(PROMPT, Sampling(6, seed=1))
        assert len(texts) == count
        return completion

    expected = generate(engine_of(model), PROMPT, Sampling(6, seed=1))
    assert asyncio.run(play()) == expected
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("caches", [True, False])
def test_without_a_cache_no_request_depends_on_the_one_before(
    model: LlamaForCausalLM, caches: bool
) -> None:
    """Without a cache, results are equal to the last bit, as `trainer.deterministic` requires.

    A partly cached context is summed in another order.
    """
    engine = TransformersEngine("", "cpu", "float32", may_share=caches)
    engine.model, engine.tokenizer = model, Latin()
    prompt, differs = list(PROMPT), False
    for _ in range(8):
        expected = generate(engine_of(model), prompt, Sampling(6, seed=2))
        got = generate(engine, prompt, Sampling(6, seed=2))
        differs |= got.log_probs != expected.log_probs
        prompt = [*prompt, *expected.ids, *b" and then?"]
    assert differs is caches


def test_a_sampled_end_of_sequence_is_kept() -> None:
    """It ends the completion and is the last id."""
    model = tiny_llama(258, eos_token_id=EOS)
    with torch.no_grad():
        hidden = model.model(torch.tensor([PROMPT])).last_hidden_state[0, -1]
        model.lm_head.weight[EOS] = hidden
    got = generate(engine_of(model), PROMPT, Sampling(5, temperature=0))
    assert (got.ids, got.finish_reason, got.text) == ((EOS,), "stop", "<eos>")


def test_all_end_tokens_of_an_instruct_model_are_kept_with_new_weights(tmp_path: Path) -> None:
    """Ranks write weights without the generation_config.json that lists further end tokens."""
    tokenizer, other = load_tokenizer(), 65
    model = tiny_llama(eos_token_id=tokenizer.eos_token_id)
    with torch.no_grad():
        hidden = model.model(torch.tensor([PROMPT])).last_hidden_state[0, -1]
        model.lm_head.weight[other] = 100 * hidden
    original, weights = tmp_path / "original", tmp_path / "weights"
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, other]
    for folder in (original, weights):
        model.save_pretrained(folder)
    tokenizer.save_pretrained(original)
    (weights / "generation_config.json").unlink()
    engine = TransformersEngine(str(original), "cpu", "float32")

    async def ends() -> list[str]:
        await engine.start()
        first = await engine.generate(PROMPT, Sampling(3, temperature=0))
        await engine.update_weights(str(weights), 1)
        second = await engine.generate(PROMPT, Sampling(3, temperature=0))
        return [first.finish_reason, second.finish_reason]

    assert asyncio.run(ends()) == ["stop", "stop"]


def test_top_p_keeps_the_smallest_set_that_holds_it() -> None:
    """Probabilities .5 .3 .2 with top_p .6 leave .5 and .3, renormalised."""
    logits = torch.tensor([0.2, 0.5, 0.3]).log()
    got = processed_log_probs(logits, Sampling(1, top_p=0.6)).exp()
    assert got.tolist() == pytest.approx([0.0, 0.625, 0.375])
    cooled = processed_log_probs(logits, Sampling(1, temperature=0.5)).exp()
    assert cooled.tolist() == pytest.approx([0.04 / 0.38, 0.25 / 0.38, 0.09 / 0.38])


def test_the_earliest_stop_string_cuts() -> None:
    """Independently of their order."""
    assert cut_at_stop("a</x>b</y>", ("</y>", "</x>")) == ("a</x>", True)
    assert cut_at_stop("abc", ("</y>",)) == ("abc", False)


def test_a_missing_model_is_named() -> None:
    """The ModelError names the missing model."""
    with pytest.raises(ModelError, match="no/such/folder"):
        asyncio.run(TransformersEngine("no/such/folder", "cpu", "float32").start())


def test_a_failed_request_leaves_no_partial_cache(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example one that runs out of memory in the middle of the layers."""
    engine, sampling = engine_of(model), Sampling(6, seed=1)
    first = generate(engine, PROMPT, sampling)
    longer = [*PROMPT, *first.ids, *b" and then?"]
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(model.model.norm, "forward", _fail)
        generate(engine, longer, sampling)
    assert generate(engine, longer, sampling) == generate(engine_of(model), longer, sampling)


def _fail(*_: object) -> None:
    raise RuntimeError("no memory")
