"""Requirements on rollout engines, tested for every built-in engine that can be trained with."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.verl.rollout.engines import (
    Running,
    exact_log_probs,
    model_in,
    save_model,
    tiny_config,
)
from verl.config import Config
from verl.errors import ConfigError
from verl.preflight.checks import engine_problems
from verl.rollout.interface import (
    build_engine,
    chosen,
)
from verl.rollout.vllm_build import CPU_LACKS
from verl.rollout.vllm_build import problems as vllm_problems
from verl.types import Completion, Sampling

TOLERANCE = 1e-3


@pytest.fixture(params=[pytest.param("vllm", marks=pytest.mark.vllm_cpu), "transformers"])
def running(request: pytest.FixtureRequest) -> Running:
    """Each engine with its original weights."""
    running: Running = request.getfixturevalue(f"session_{request.param}")
    running.reset()
    return running


def test_log_probs_are_those_of_the_current_weights(running: Running, tmp_path: Path) -> None:
    """Before and after updates, for a cached prompt; completions have the current version."""
    prompt = running.tokenizer.encode("The capital of France is " * 20)
    for version in (0, 3, 4):
        folder = running.folder
        if version:
            folder = tmp_path / str(version)
            save_model(folder, seed=version)
            running.update(folder, version)
        got = running.generate(prompt, seed=version, temperature=0.7)
        assert got.weight_version == version
        assert len(got.ids) == len(got.log_probs) > 0
        if version == 0:
            got = running.generate(prompt, seed=version)  # at temperature 1
        else:
            got = running.generate(prompt, seed=version, temperature=1.0)
        expected = exact_log_probs(model_in(folder), [*prompt, *got.ids], len(prompt))
        assert got.log_probs == pytest.approx(expected, abs=TOLERANCE)


def test_line_29_ids_are_scored_with_the_current_weights(running: Running, tmp_path: Path) -> None:
    """As by transformers, for each version; the ids are not in the prefix cache afterwards."""
    ids = running.tokenizer.encode("The capital of France is " * 20)
    expected = running.generate(ids, seed=1)
    running.reset()
    for version in (0, 3, 4):
        folder = running.folder if version == 0 else tmp_path / str(version)
        if version:
            save_model(folder, seed=version)
            running.update(folder, version)
        got = running.loop.run_until_complete(running.engine.score(ids))
        assert got == pytest.approx(exact_log_probs(model_in(folder), ids, 1), abs=TOLERANCE)
        if version == 0:
            assert running.generate(ids, seed=1).measured.num_cached == 0
            running.reset()
            running.loop.run_until_complete(running.engine.score(ids))
            again = running.generate(ids, seed=1)
            assert (again.ids, again.log_probs) == (expected.ids, expected.log_probs)


def test_seeds_repeat_and_greedy_ignores_them(running: Running) -> None:
    """A seed repeats its ids, another seed gives others; temperature 0 ignores the seed."""
    prompt = running.tokenizer.encode("Who was it?")
    one, other, again = (running.generate(prompt, seed=seed).ids for seed in (1, 2, 1))
    assert one == again != other
    greedy = {running.generate(prompt, seed=seed, temperature=0.0).ids for seed in (1, 2)}
    assert len(greedy) == 1


def test_the_stop_string_is_kept_and_ends_the_text(running: Running) -> None:
    """Its token is the last of the ids, and has a log-prob."""
    prompt = running.tokenizer.encode("Tell me")
    free = running.generate(prompt, seed=4, max_tokens=12)
    assert (free.finish_reason, len(free.ids)) == ("length", 12)
    tag = free.text[len(free.text) // 2 :][:4]
    stopped = running.generate(prompt, seed=4, max_tokens=12, stop=(tag, "never"))
    assert stopped.finish_reason == "stop" and stopped.text.count(tag) == 1
    assert stopped.ids == free.ids[: len(stopped.ids)]
    assert len(stopped.ids) == len(stopped.log_probs)


def test_the_streamed_text_is_that_of_the_completion(running: Running) -> None:
    """The pieces add up to its text, which is that of `generate`."""
    prompt, sampling, texts = running.tokenizer.encode("Tell me"), Sampling(8, seed=6), []
    stream = running.engine.stream(prompt, sampling, texts.append)
    streamed = running.loop.run_until_complete(stream)
    assert "".join(texts) == streamed.text
    assert streamed.ids == running.generate(prompt, seed=6).ids


def test_concurrent_requests_do_not_affect_each_other(running: Running) -> None:
    """Each gets the same ids as alone."""
    prompts = [running.tokenizer.encode(text) for text in ("Who?", "Where is it?", "Why so?")]

    async def together() -> list[Completion]:
        requests = [Sampling(8, seed=n) for n in range(len(prompts))]
        return await asyncio.gather(*map(running.engine.generate, prompts, requests))

    alone = [running.generate(prompt, seed=n).ids for n, prompt in enumerate(prompts)]
    assert [c.ids for c in running.loop.run_until_complete(together())] == alone


def test_what_old_weights_cached_is_not_used_with_new_ones(
    running: Running, tmp_path: Path
) -> None:
    """After an update, log-probs are those of the new weights, given a prompt that was cached."""
    save_model(tmp_path, seed=5)
    prompt = running.tokenizer.encode("The capital of France is " * 60)
    assert 256 < len(prompt) < 400  # several cache blocks
    for version, folder in ((0, running.folder), (5, tmp_path)):
        if version:
            update = running.engine.update_weights(str(folder), version)
            running.loop.run_until_complete(update)
        got = running.generate(prompt, seed=0)
        exact = exact_log_probs(model_in(folder), [*prompt, *got.ids], len(prompt))
        assert got.log_probs == pytest.approx(exact, abs=TOLERANCE)
        assert got.weight_version == version


def test_an_engine_works_after_sleep_and_a_weight_update(running: Running) -> None:
    """The calls come in the trainer's order; a running engine answers a probe at any time."""
    prompt = running.tokenizer.encode("Tell me")
    before = running.generate(prompt, seed=6)
    for call in (running.engine.sleep(), running.engine.wake_up(), running.engine.probe()):
        running.loop.run_until_complete(call)
    running.reset()
    assert running.generate(prompt, seed=6).ids == before.ids


def test_an_engine_that_never_started_can_be_probed_and_shut_down(tmp_path: Path) -> None:
    """So the end of a run can shut an engine down without knowing whether it has started."""
    for name in ("vllm", "transformers"):
        engine = build_engine(tiny_config(tmp_path, name))
        asyncio.run(engine.probe())
        asyncio.run(engine.shutdown())


OWN = """
from verl.rollout.interface import RolloutEngine
from verl.types import Completion


class Parrot(RolloutEngine):
    takes_weights = True

    def __init__(self, config, replica):
        self.replica, self.version = replica, 0

    async def generate(self, prompt_ids, sampling):
        return Completion(tuple(prompt_ids), (0.0,) * len(prompt_ids), "said", "stop", self.version)

    async def update_weights(self, folder, version):
        self.version = version


class Fixed(Parrot):
    takes_weights = False
"""


def test_a_user_defined_engine_is_one_file(tmp_path: Path) -> None:
    """It needs `generate` and, for training, `update_weights`; the rest has defaults."""
    (tmp_path / "own.py").write_text(OWN)
    config = tiny_config(tmp_path, f"{tmp_path}/own.py:Parrot")
    config.actor_rollout_ref.model.lora_rank = 8
    assert list(engine_problems(config)) == [] and chosen(config).is_whole
    engine, texts = build_engine(config, replica=3), []

    async def use() -> Completion:
        for call in (engine.start(), engine.wake_up(), engine.update_weights("f", 7)):
            await call
        completion = await engine.stream([1, 2], Sampling(8), texts.append)
        for call in (engine.probe(), engine.sleep(), engine.shutdown()):
            await call
        return completion

    assert asyncio.run(use()) == Completion((1, 2), (0.0, 0.0), "said", "stop", 7)
    assert texts == ["said"] and engine.replica == 3


def problems(config: Config) -> list[str]:
    return [str(problem) for problem in engine_problems(config)]


def test_an_engine_that_cannot_load_weights_is_rejected_for_training(tmp_path: Path) -> None:
    """Before any work, with a hint to evaluation; so is an unknown name."""
    (tmp_path / "own.py").write_text(OWN)
    for name in ("remote", f"{tmp_path}/own.py:Fixed"):
        (problem,) = problems(tiny_config(tmp_path, name))
        assert "can load new weights" in problem and "--endpoint" in problem
    (problem,) = problems(tiny_config(tmp_path, "vlm"))
    assert "got 'vlm'" in problem and "did you mean vllm?" in problem
    with pytest.raises(ConfigError, match=r"rollout\.url"):
        build_engine(tiny_config(tmp_path, "remote"))


@pytest.mark.parametrize("name", CPU_LACKS)
def test_arguments_that_vllms_cpu_build_lacks_are_rejected_there(tmp_path: Path, name: str) -> None:
    """They fail in its engine, or change what it samples."""
    config = tiny_config(tmp_path)
    config.actor_rollout_ref.rollout.engine_kwargs = {name: "x"}
    (problem,) = map(str, vllm_problems(config))
    assert f"engine_kwargs.{name}: got x, expected nothing" in problem
    config.trainer.device = "cuda"
    assert list(vllm_problems(config)) == []


def test_a_driver_without_gpus_accepts_gpu_options_for_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trainer.device=auto` is resolved on the nodes of the ranks."""
    config = tiny_config(tmp_path, "vllm")
    config.actor_rollout_ref.rollout.engine_kwargs = {"quantization": "fp8_per_tensor"}
    for device, address, num in (
        ("auto", "", 1),
        ("auto", "head:6379", 0),
        ("cpu", "head:6379", 1),
    ):
        config.trainer.device = device
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert len([*vllm_problems(config)]) == num
