"""Tokens that vLLM guesses and verifies leave what is sampled as it is, log-probs included."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from example.model import load_tokenizer
from example.tiny import tiny_llama
from tests.verl.rollout.engines import model_in, tiny_config
from verl.rollout.interface import build_engine
from verl.rollout.vllm_engine import VllmSettings
from verl.rollout.weight_loading import expand_to_tokens
from verl.types import Completion, Sampling

LIKELY = list(range(100, 108))
"""Tokens that the model says: what follows the last ones stood there before, as a rule."""
MOST_SIGMA = 4.5


def deviations(chosen: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """How often each token came, less how often it should have, in standard deviations.

    chosen: (num_tokens,); probs: (num_tokens, vocab), each given what was sampled before it; only
    of tokens that should come 20 times.
    """
    came = torch.bincount(chosen, minlength=probs.shape[1]).double()
    should, variance = probs.sum(0), (probs * (1 - probs)).sum(0)
    return ((came - should) / variance.sqrt())[should > 20]


def test_each_token_has_its_requests_value() -> None:
    """As a loop does it, floats unrounded, the marked value replaced, requests without tokens."""
    values, lengths = torch.tensor([0.7, 0.0, 1.3, 0.2]), [3, 1, 0, 2]
    expected = [v or 1.0 for v, n in zip(values.tolist(), lengths, strict=True) for _ in range(n)]
    found = expand_to_tokens(values, torch.tensor(lengths, dtype=torch.int32).cumsum(0), 6, 0, 1)
    assert found.tolist() == expected and found.dtype == values.dtype


def test_what_vllm_is_told_to_guess() -> None:
    """Nothing unless it is asked for; the words that ngram looks for are ngram's alone."""
    config = tiny_config(Path("policy"))
    assert "speculative_config" not in VllmSettings(config).arguments()
    chosen = config.actor_rollout_ref.rollout.speculative_config
    chosen.method, chosen.num_speculative_tokens, chosen.prompt_lookup_max = "ngram", 7, 4
    given = VllmSettings(config).arguments()
    assert given["speculative_config"] == {
        "method": "ngram", "num_speculative_tokens": 7,
        "prompt_lookup_min": chosen.prompt_lookup_min, "prompt_lookup_max": 4,
    }  # fmt: skip
    chosen.method = "suffix"
    expected = {"method": "suffix", "num_speculative_tokens": 7}
    assert VllmSettings(config).arguments()["speculative_config"] == expected


@pytest.mark.vllm_cpu
def test_verified_tokens_have_the_targets_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's rejection sampler on the CPU, 6,000 requests of three temperatures with the likeliest
    tokens as guesses: first tokens by their frequency, log-probs exactly, greedy ones the first."""
    from vllm.platforms import current_platform  # noqa: PLC0415
    from vllm.triton_utils.dispatcher import KernelOverride  # noqa: PLC0415
    from vllm.utils import cpu_triton_utils  # noqa: PLC0415
    from vllm.v1.sample import rejection_sampler as sampling  # noqa: PLC0415
    from vllm.v1.sample.logits_processor import LogitsProcessors  # noqa: PLC0415
    from vllm.v1.sample.metadata import SamplingMetadata  # noqa: PLC0415
    from vllm.v1.sample.sampler import Sampler  # noqa: PLC0415
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata  # noqa: PLC0415

    current_platform.import_kernels()
    for name in ("rejection_greedy_sample", "rejection_random_sample", "sample_recovered_tokens"):
        kernel = getattr(sampling, f"{name}_kernel")
        replaced = KernelOverride(kernel, getattr(cpu_triton_utils, f"_{name}_kernel_impl"))
        monkeypatch.setattr(getattr(sampling, f"_{name}"), "kernel", replaced)
    monkeypatch.setattr(sampling, "expand_batch_to_tokens", expand_to_tokens)
    temperatures = torch.tensor([0.0, 0.7, 1.0, 1.4]).repeat(2000)
    num, guesses, vocab = len(temperatures), 2, 30
    torch.manual_seed(0)
    row = torch.randn(guesses + 1, vocab) * 2
    guess = row.argmax(-1)[:guesses].int()
    logits = row.repeat(num, 1)
    ends = torch.arange(1, num + 1, dtype=torch.int32)
    positions = torch.arange(num * (guesses + 1), dtype=torch.int32).view(num, -1)
    metadata = SpecDecodeMetadata(
        guess.repeat(num), [guesses] * num, ends * guesses, ends * (guesses + 1),
        positions[:, :-1].flatten(), positions[:, -1].contiguous(), positions.flatten(),
    )  # fmt: skip
    none = torch.zeros(num)
    asked = SamplingMetadata(
        temperature=temperatures, all_greedy=False, all_random=False, top_p=None, top_k=None,
        generators={}, max_num_logprobs=0, no_penalties=True, prompt_token_ids=None,
        frequency_penalties=none, presence_penalties=none, repetition_penalties=none + 1,
        output_token_ids=[[] for _ in range(num)], allowed_token_ids_mask=None,
        bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
    )  # fmt: skip
    sampler = sampling.RejectionSampler(Sampler(logprobs_mode="processed_logprobs"))
    found = sampler(metadata, None, logits, asked)
    first = found.sampled_token_ids[:, 0].long()
    told = found.logprobs_tensors.logprobs.view(num, guesses + 1, -1)[:, 0, 0]
    assert (first[temperatures == 0] == row[0].argmax()).all()
    for temperature in (0.7, 1.0, 1.4):
        ours = temperatures == temperature
        exact = (row[0] / temperature).log_softmax(-1)
        assert torch.equal(told[ours], exact[first[ours]])
        probs = exact.exp().double().expand(int(ours.sum()), -1)
        assert deviations(first[ours], probs).abs().max() < MOST_SIGMA
        assert deviations(first[ours], probs.roll(1, -1)).abs().max() > MOST_SIGMA


def save_talker(folder: Path, seed: int) -> None:
    """A model that says `LIKELY` in an order of its own, by attention too."""
    tokenizer = load_tokenizer()
    tokenizer.save_pretrained(folder)
    model = tiny_llama(tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id, seed=seed)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 10.0  # of every token: it outweighs the rest
        model.lm_head.weight[LIKELY, 0] = 8.0
        model.lm_head.weight[LIKELY, 1:] *= 1.2
    model.save_pretrained(folder)


@dataclass
class Played:
    """What an engine sampled."""

    sampled: list[tuple[list[int], float, Completion]]
    """Prompt, temperature, completion."""
    greedy: Completion
    stopped: Completion
    again: list[Completion]
    """Of one seed."""


async def play(method: str | None, folders: list[Path]) -> Played:
    """All that is compared, by an engine that starts with the first weights and gets the second."""
    config = tiny_config(folders[0])
    chosen = config.actor_rollout_ref.rollout.speculative_config
    chosen.method, chosen.prompt_lookup_min, chosen.prompt_lookup_max = method, 1, 3
    engine, sampled = build_engine(config), []
    await engine.start()
    prompts = [LIKELY[n:] + LIKELY[:n] for n in range(8)] * 2
    asked = [(prompt, t) for t in (0.7, 1.0) for prompt in prompts]
    greedy = await engine.generate(prompts[0], Sampling(60, 0.0))
    stop = (greedy.text[len(greedy.text) // 2 :][:12],)
    stopped = await engine.generate(prompts[0], Sampling(60, 0.0, stop=stop))
    again = [await engine.generate(prompts[0], Sampling(60, 1.0, seed=7)) for _ in range(2)]
    for version, folder in enumerate(folders):
        if version:
            await engine.update_weights(str(folder), version)
        requests = [Sampling(60, t, seed=100 * version + n) for n, (_, t) in enumerate(asked)]
        calls = map(engine.generate, [prompt for prompt, _ in asked], requests)
        found = await asyncio.gather(*calls)
        sampled += [(*one, completion) for one, completion in zip(asked, found, strict=True)]
    await engine.shutdown()
    return Played(sampled, greedy, stopped, again)


@pytest.mark.slow
@pytest.mark.vllm_cpu
def test_an_engine_that_guesses_samples_what_it_samples_without(tmp_path: Path) -> None:
    """The distribution of 1,920 tokens of each weights, given all before each, and their
    log-probs, by transformers; greedy ids and stop strings are those without, a seed repeats."""
    folders = [tmp_path / "0", tmp_path / "1"]
    for seed, folder in enumerate(folders):
        save_talker(folder, seed)
    plain, guessed = (asyncio.run(play(method, folders)) for method in (None, "ngram"))
    for played in (plain, guessed):
        for version, folder in enumerate(folders):
            check(
                model_in(folder),
                [one for one in played.sampled if one[2].weight_version == version],
            )
    drafted = sum(completion.counts.drafted for *_, completion in guessed.sampled)
    accepted = sum(completion.counts.accepted for *_, completion in guessed.sampled)
    assert 0.05 * drafted < accepted < 0.95 * drafted and drafted > 500
    assert sum(completion.counts.drafted for *_, completion in plain.sampled) == 0
    assert plain.greedy.ids == guessed.greedy.ids and guessed.greedy.counts.accepted > 5
    assert plain.stopped.ids == guessed.stopped.ids and guessed.stopped.finish_reason == "stop"
    assert guessed.again[0].ids == guessed.again[1].ids


def check(model: torch.nn.Module, sampled: list[tuple[list[int], float, Completion]]) -> None:
    """Log-probs and frequencies of what weights sampled are those that they give."""
    chosen, probs = [], []
    for prompt, temperature, completion in sampled:
        ids = torch.tensor([*prompt, *completion.ids])
        with torch.no_grad():
            rows = model(ids[None]).logits[0, len(prompt) - 1 : -1] / temperature
        exact, said = rows.log_softmax(-1), torch.tensor(completion.ids)
        told = torch.tensor(completion.log_probs)
        assert torch.allclose(told, exact[range(len(said)), said], atol=1e-3)
        chosen.append(said - LIKELY[0])
        probs.append(exact[:, LIKELY].exp().double())
    found = deviations(torch.cat(chosen), torch.cat(probs))
    assert len(found) > 3 and found.abs().max() < MOST_SIGMA
