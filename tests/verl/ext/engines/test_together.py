"""Requests that the transformers engine serves together are sampled as each alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.verl.ext.engines.test_context_cache import judged, of_every_family, tiny_model
from tests.verl.ext.engines.test_transformers import engine_of, own_log_probs
from verl.ext.engines.together import Together
from verl.types import Completion, Sampling

TEXTS = (b"Who is it?", b"A", b"Where is Oslo, the city? In Norway.", b"And then", b"Who is it?")
LENGTHS = (9, 2, 6, 12, 4)
"""Tokens of each request, so that rows leave at different times."""
FIT = {"llama", "granite", "bloom", "gpt2"}
"""Families of `FAMILIES` whose requests are served together; a cache of theirs can be padded."""


async def later(engine: Any, ids: list[int], sampling: Sampling, after: int) -> Completion:
    """Ask for a completion once the engine has finished `after` steps."""
    for _ in range(after):
        await asyncio.sleep(0.002)
    completion: Completion = await engine.generate(ids, sampling)
    return completion


def together(engine: Any, delays: tuple[int, ...] = (0,) * len(TEXTS)) -> list[Completion]:
    """Return the completions of all texts, asked for at once or with delays."""

    async def play() -> list[Completion]:
        asked = zip(TEXTS, LENGTHS, delays, strict=True)
        return await asyncio.gather(*(
            later(engine, list(text), Sampling(length, seed=n), delay)
            for n, (text, length, delay) in enumerate(asked)
        ))  # fmt: skip

    return asyncio.run(play())


@of_every_family
def test_log_probs_are_those_of_each_sequence_alone(family: str) -> None:
    """Of every family and kind of cache, with requests that come and go at different times."""
    model = tiny_model(family)
    engine = judged(model)
    assert engine._together.fits is (family in FIT)
    for delays in ((0, 0, 0, 0, 0), (0, 3, 1, 8, 5)):
        done = together(engine, delays)
        for text, length, got in zip(TEXTS, LENGTHS, done, strict=True):
            assert len(got.ids) == length or got.finish_reason == "stop"
            assert got.log_probs == pytest.approx(own_log_probs(model, [*text], got), abs=1e-4)


def test_a_seed_gives_the_same_ids_alone_and_together() -> None:
    """Beyond rounding, a request does not depend on the others."""
    model = tiny_model("llama")
    alone = [
        asyncio.run(engine_of(model).generate(list(text), Sampling(length, seed=n)))
        for n, (text, length) in enumerate(zip(TEXTS, LENGTHS, strict=True))
    ]
    got = together(engine_of(model))
    assert [one.ids for one in got] == [one.ids for one in alone]


@pytest.mark.parametrize("may_share", [True, False])
def test_a_forward_pass_serves_all_that_may_share(may_share: bool) -> None:
    """Passes over a model: one a step and one for the prompts; else one for each token."""
    model, engine = tiny_model("llama"), engine_of(tiny_model("llama"))
    passes = list[int]()
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    engine.model, engine._may_share = model, may_share
    done = together(engine)
    num_tokens = sum(len(one.ids) for one in done)
    assert len(passes) == (max(len(one.ids) for one in done) if may_share else num_tokens)


def test_a_limit_on_rows_is_kept_and_nobody_starves() -> None:
    """Two at a time: later requests begin when earlier ones end."""
    model, engine, sizes = tiny_model("llama"), engine_of(tiny_model("llama")), list[int]()
    model.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[0]))
    engine.model, engine._max_requests = model, 2
    done = together(engine)
    alone = together(engine_of(tiny_model("llama")))
    assert [one.ids for one in done] == [one.ids for one in alone] and max(sizes) == 2


def test_rows_that_do_not_fit_in_the_cache_wait() -> None:
    """A token has 4 layers x 2 heads x 8 keys and values of 4 bytes; rows are padded."""
    engine, sizes = judged(tiny_model("llama")), list[int]()
    assert engine._together.admitted([9, 12, 20]) == 3
    room = Together(max_bytes=2 * 36 * 4 * 2 * 2 * 8 * 4)
    room.judge(engine.model, engine.tokenizer, "llama", 1e-4)
    assert [room.admitted(x) for x in ([36], [9, 36], [9, 9, 36], [99, 9], [24, 24, 24, 9])] == [
        1, 2, 2, 1, 3]  # fmt: skip
    engine._together = room
    engine.model.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[0]))
    done = together(engine)
    alone = together(engine_of(tiny_model("llama")))
    assert [one.ids for one in done] == [one.ids for one in alone] and max(sizes) == 2


def test_a_failed_step_fails_its_requests_and_leaves_no_rows() -> None:
    """For example one that runs out of memory; the next requests are not affected."""
    model = tiny_model("llama")
    engine, fails = engine_of(model), True

    def fail(*_: object) -> None:
        if fails:
            raise RuntimeError("no memory")

    model.model.norm.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError):
        together(engine)
    assert not engine._together._lengths
    fails = False
    assert [one.ids for one in together(engine)] == [one.ids for one in together(engine_of(model))]


def test_a_cancelled_request_leaves_the_others() -> None:
    """Its row is dropped after the step that runs."""
    engine = engine_of(tiny_model("llama"))

    async def play() -> Completion:
        endless = Sampling(1_000_000, seed=3)
        tasks = [asyncio.create_task(engine.generate(list(text), endless)) for text in TEXTS[:3]]
        other = asyncio.create_task(engine.generate(list(TEXTS[3]), Sampling(40, seed=1)))
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        return await other

    alone = engine_of(tiny_model("llama"))
    expected = asyncio.run(alone.generate(list(TEXTS[3]), Sampling(40, seed=1)))
    assert asyncio.run(play()).ids == expected.ids
    assert not engine._requests and len(engine._together._lengths) <= 1


def test_rows_that_differ_from_their_own_sequence_are_served_one_after_another() -> None:
    """A model that reads the padding: `judge` says so, and requests are not padded."""
    model = tiny_model("llama")

    class Ignores:
        """The model without its mask."""

        device, dtype, config = model.device, model.dtype, model.config

        def forward(self, input_ids: Any, **arguments: Any) -> Any:
            return model(input_ids, **arguments | {"attention_mask": None, "position_ids": None})

        __call__ = forward

    engine = judged(model)
    assert engine._together.fits
    batch = Together()
    batch.judge(Ignores(), engine.tokenizer, "ignores", 1e-4)
    assert not batch.fits
