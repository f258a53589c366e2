"""Speculative decoding in vLLM changes neither the sampled distribution nor the log-probs."""

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
"""The tokens that the model samples; their sequences often repeat, so that drafts are accepted."""
MAX_SIGMA = 4.5


def deviations(chosen: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Return observed minus expected count of each token in standard deviations.

    chosen: (num_tokens,); probs: (num_tokens, vocab), each given the tokens before it. Only tokens
    that are expected more than 20 times are returned.
    """
    observed = torch.bincount(chosen, minlength=probs.shape[1]).double()
    expected, variance = probs.sum(0), (probs * (1 - probs)).sum(0)
    return ((observed - expected) / variance.sqrt())[expected > 20]


def test_each_token_has_its_requests_value() -> None:
    """As by a loop: floats are not rounded, a value is replaced, requests may have no tokens."""
    values, lengths = torch.tensor([0.7, 0.0, 1.3, 0.2]), [3, 1, 0, 2]
    expected = [v or 1.0 for v, n in zip(values.tolist(), lengths, strict=True) for _ in range(n)]
    expanded = expand_to_tokens(values, torch.tensor(lengths, dtype=torch.int32).cumsum(0), 6, 0, 1)
    assert expanded.tolist() == expected and expanded.dtype == values.dtype


def test_the_options_of_speculative_decoding() -> None:
    """None by default; the lookup lengths are options of `ngram` only."""
    config = tiny_config(Path("policy"))
    assert "speculative_config" not in VllmSettings(config).arguments()
    options = config.actor_rollout_ref.rollout.speculative_config
    options.method, options.num_speculative_tokens, options.prompt_lookup_max = "ngram", 7, 4
    arguments = VllmSettings(config).arguments()
    assert arguments["speculative_config"] == {
        "method": "ngram", "num_speculative_tokens": 7,
        "prompt_lookup_min": options.prompt_lookup_min, "prompt_lookup_max": 4,
    }  # fmt: skip
    options.method = "suffix"
    expected = {"method": "suffix", "num_speculative_tokens": 7}
    assert VllmSettings(config).arguments()["speculative_config"] == expected


@pytest.mark.vllm_cpu
def test_verified_tokens_have_the_targets_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's rejection sampler gives first tokens the right frequencies and exact log-probs.

    It runs on the CPU with 6,000 requests of three temperatures and the most likely tokens as
    drafts. Greedy requests have the most likely token.
    """
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
    num, num_drafts, vocab = len(temperatures), 2, 30
    torch.manual_seed(0)
    row = torch.randn(num_drafts + 1, vocab) * 2
    draft = row.argmax(-1)[:num_drafts].int()
    logits = row.repeat(num, 1)
    ends = torch.arange(1, num + 1, dtype=torch.int32)
    positions = torch.arange(num * (num_drafts + 1), dtype=torch.int32).view(num, -1)
    metadata = SpecDecodeMetadata(
        draft.repeat(num), [num_drafts] * num, ends * num_drafts, ends * (num_drafts + 1),
        positions[:, :-1].flatten(), positions[:, -1].contiguous(), positions.flatten(),
    )  # fmt: skip
    none = torch.zeros(num)
    sampling_metadata = SamplingMetadata(
        temperature=temperatures, all_greedy=False, all_random=False, top_p=None, top_k=None,
        generators={}, max_num_logprobs=0, no_penalties=True, prompt_token_ids=None,
        frequency_penalties=none, presence_penalties=none, repetition_penalties=none + 1,
        output_token_ids=[[] for _ in range(num)], allowed_token_ids_mask=None,
        bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
    )  # fmt: skip
    sampler = sampling.RejectionSampler(Sampler(logprobs_mode="processed_logprobs"))
    output = sampler(metadata, None, logits, sampling_metadata)
    first = output.sampled_token_ids[:, 0].long()
    log_probs = output.logprobs_tensors.logprobs.view(num, num_drafts + 1, -1)[:, 0, 0]
    assert (first[temperatures == 0] == row[0].argmax()).all()
    for temperature in (0.7, 1.0, 1.4):
        selected = temperatures == temperature
        exact = (row[0] / temperature).log_softmax(-1)
        assert torch.equal(log_probs[selected], exact[first[selected]])
        probs = exact.exp().double().expand(int(selected.sum()), -1)
        assert deviations(first[selected], probs).abs().max() < MAX_SIGMA
        assert deviations(first[selected], probs.roll(1, -1)).abs().max() > MAX_SIGMA


def save_talker(folder: Path, seed: int) -> None:
    """Save a model that samples the tokens of `LIKELY`, in an order that depends on the context."""
    tokenizer = load_tokenizer()
    tokenizer.save_pretrained(folder)
    model = tiny_llama(tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id, seed=seed)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 10.0  # for every token: it dominates
        model.lm_head.weight[LIKELY, 0] = 8.0
        model.lm_head.weight[LIKELY, 1:] *= 1.2
    model.save_pretrained(folder)


@dataclass
class Played:
    """The completions of one engine."""

    sampled: list[tuple[list[int], float, Completion]]
    """Prompt, temperature and completion of each request."""
    greedy: Completion
    stopped: Completion
    repeated: list[Completion]
    """Two completions with the same seed."""


async def play(method: str | None, folders: list[Path]) -> Played:
    """Sample with an engine that starts with the first weights and then loads the second."""
    config = tiny_config(folders[0])
    options = config.actor_rollout_ref.rollout.speculative_config
    options.method, options.prompt_lookup_min, options.prompt_lookup_max = method, 1, 3
    engine, sampled = build_engine(config), []
    await engine.start()
    prompts = [LIKELY[n:] + LIKELY[:n] for n in range(8)] * 2
    cases = [(prompt, t) for t in (0.7, 1.0) for prompt in prompts]
    greedy = await engine.generate(prompts[0], Sampling(60, 0.0))
    stop = (greedy.text[len(greedy.text) // 2 :][:12],)
    stopped = await engine.generate(prompts[0], Sampling(60, 0.0, stop=stop))
    repeated = [await engine.generate(prompts[0], Sampling(60, 1.0, seed=7)) for _ in range(2)]
    for version, folder in enumerate(folders):
        if version:
            await engine.update_weights(str(folder), version)
        requests = [Sampling(60, t, seed=100 * version + n) for n, (_, t) in enumerate(cases)]
        calls = map(engine.generate, [prompt for prompt, _ in cases], requests)
        completions = await asyncio.gather(*calls)
        sampled += [(*case, got) for case, got in zip(cases, completions, strict=True)]
    await engine.shutdown()
    return Played(sampled, greedy, stopped, repeated)


@pytest.mark.slow
@pytest.mark.vllm_cpu
def test_speculative_decoding_does_not_change_what_an_engine_samples(tmp_path: Path) -> None:
    """1,920 tokens of each model have the distribution and log-probs of transformers.

    Greedy ids and stop strings are those without speculation, and a seed repeats its ids.
    """
    folders = [tmp_path / "0", tmp_path / "1"]
    for seed, folder in enumerate(folders):
        save_talker(folder, seed)
    plain, drafting = (asyncio.run(play(method, folders)) for method in (None, "ngram"))
    for played in (plain, drafting):
        for version, folder in enumerate(folders):
            check(
                model_in(folder),
                [case for case in played.sampled if case[2].weight_version == version],
            )
    drafted = sum(completion.counts.drafted for *_, completion in drafting.sampled)
    accepted = sum(completion.counts.accepted for *_, completion in drafting.sampled)
    assert 0.05 * drafted < accepted < 0.95 * drafted and drafted > 500
    assert sum(completion.counts.drafted for *_, completion in plain.sampled) == 0
    assert plain.greedy.ids == drafting.greedy.ids and drafting.greedy.counts.accepted > 5
    assert plain.stopped.ids == drafting.stopped.ids and drafting.stopped.finish_reason == "stop"
    assert drafting.repeated[0].ids == drafting.repeated[1].ids


def check(model: torch.nn.Module, sampled: list[tuple[list[int], float, Completion]]) -> None:
    """Assert that the completions have the log-probs and frequencies of the model."""
    chosen, probs = [], []
    for prompt, temperature, completion in sampled:
        ids = torch.tensor([*prompt, *completion.ids])
        with torch.no_grad():
            rows = model(ids[None]).logits[0, len(prompt) - 1 : -1] / temperature
        exact, sampled_ids = rows.log_softmax(-1), torch.tensor(completion.ids)
        log_probs = torch.tensor(completion.log_probs)
        expected = exact[range(len(sampled_ids)), sampled_ids]
        assert torch.allclose(log_probs, expected, atol=1e-3)
        chosen.append(sampled_ids - LIKELY[0])
        probs.append(exact[:, LIKELY].exp().double())
    sigmas = deviations(torch.cat(chosen), torch.cat(probs))
    assert len(sigmas) > 3 and sigmas.abs().max() < MAX_SIGMA
