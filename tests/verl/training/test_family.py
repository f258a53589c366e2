"""The packed forward pass is the model's own, for every family that is accepted."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, PretrainedConfig, PreTrainedModel

from scripts import family_page
from verl.config import AdapterConfig
from verl.errors import ModelError
from verl.ext.lora.adapter import Adapter
from verl.ext.lora.model import AdaptedModel, Role
from verl.packing import share_prompts
from verl.training import family, models
from verl.training.attention import PACKED, packed_attention
from verl.training.mixers import RunByRun
from verl.training.models import LogProbModel, PackedInputs, ValueModel, recompute, trunk_of

CPU = torch.device("cpu")
AWKWARD = ("qwen3_5", "gemma2", "gemma3", "gpt_oss", "lfm2", "granite", "falcon_h1")
"""States, soft caps, a composite config, sinks, convolutions, scaled logits, states and heads."""


def trial(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Return a small model of a family, with its own attention."""
    torch.manual_seed(0)
    return family.build_trial(family_page.family_config(name)).to(dtype)


def packed_inputs(shares_prompts: bool) -> tuple[Any, PackedInputs]:
    batch = family.trial_batch()
    if shares_prompts:
        share_prompts(batch)
    return batch, PackedInputs.of(batch, batch.tokens["policy_mask"], CPU)


def test_line_28_the_packed_forward_pass_is_the_models_own() -> None:
    """docs/guides/models.md lists the right and the refused families, as the probe finds them."""
    page = Path(family_page.__file__).parents[1] / "docs" / "guides" / "models.md"
    assert family_page.page() in page.read_text(encoding="utf-8"), "print it again"


@pytest.mark.parametrize(
    ("name", "shares_prompts"), [*((name, True) for name in AWKWARD), ("qwen3_5", False)]
)
def test_line_28_gradients_are_those_of_the_models_own_forward(
    name: str, shares_prompts: bool
) -> None:
    """With every block computed again in backward, as on the ranks.

    In float64, where the family computes in it; its norms, say, may still be in float32.
    """
    lm = trial(name, torch.float32 if name == "gpt_oss" else torch.float64)
    batch, inputs = packed_inputs(shares_prompts)
    weights = torch.linspace(-1, 1, len(inputs.target_positions), dtype=torch.float64)
    reference = copy_of(lm).eval()
    own = torch.cat(list(family.own_log_probs(reference, batch)))
    (own * weights).sum().backward()
    lm.set_attn_implementation(PACKED)
    recompute(lm, True)
    log_probs, _ = LogProbModel(lm).train()(inputs, 1.0)
    torch.testing.assert_close(log_probs.double(), own.double(), rtol=0, atol=1e-4)
    (log_probs * weights).sum().backward()
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    found = {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        assert (found[parameter] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-6, parameter


def copy_of(lm: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(lm)


@pytest.mark.parametrize("name", AWKWARD)
def test_values_and_adapters_of_awkward_families(name: str) -> None:
    """The critic's values are those of the trunk alone; an adapter acts as if it were merged."""
    lm = trial(name, torch.float32)
    batch, inputs = packed_inputs(shares_prompts=True)
    plain = copy_of(lm).eval()
    critic = ValueModel(packed(copy_of(lm)))
    torch.nn.init.normal_(critic.value_head.weight)
    mask = batch.tokens["policy_mask"].bool()
    expected: list[Tensor] = []
    with torch.no_grad():
        for start, length in zip(batch.offsets.tolist(), batch.lengths.tolist(), strict=False):
            own = slice(start, start + length)
            ids = batch.tokens["input_ids"][own][None]
            hidden = trunk_of(plain)(input_ids=ids, use_cache=False).last_hidden_state
            values = critic.value_head(hidden)[0, :-1, 0]
            expected.append(values[mask[own][1:]])
        torch.testing.assert_close(critic(inputs), torch.cat(expected), rtol=1e-4, atol=1e-4)
        adapted = AdaptedModel(packed(copy_of(lm)), {Role.ACTOR: AdapterConfig(lora_rank=2)})
        for parameter_name, parameter in adapted.named_parameters():
            if ".lora_B." in parameter_name:
                torch.nn.init.normal_(parameter, std=0.1)
        found, _ = adapted(inputs, 1.0)
        merged = adapter_merged(plain, adapted)
        own_log_probs = torch.cat(list(family.own_log_probs(merged, batch)))
        base = torch.cat(list(family.own_log_probs(copy_of(lm).eval(), batch)))
    torch.testing.assert_close(found, own_log_probs, rtol=0, atol=1e-3)
    assert (found - base).abs().max() > 0.01  # the adapter does something


def packed(lm: PreTrainedModel) -> PreTrainedModel:
    lm.set_attn_implementation(PACKED)
    return lm


def adapter_merged(lm: PreTrainedModel, adapted: AdaptedModel) -> PreTrainedModel:
    """Return `lm` with the weights that an export of the adapted model would have."""
    named = dict(adapted.named_parameters())
    adapter = Adapter.of_parameters(adapted.configs[Role.ACTOR], named, Role.ACTOR)
    for name, weight in lm.named_parameters():
        delta = adapter.delta(name)
        if delta is not None:
            weight.add_(delta)
    return lm


def broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break one of the mechanisms, as earlier versions were broken."""
    match name:
        case "states":
            monkeypatch.setattr(RunByRun, "__call__", lambda run, *a, **k: run.forward(
                *a, **{n: v for n, v in k.items() if n != "bounds"}))  # fmt: skip
        case "tail":
            monkeypatch.setattr(
                models, "logits_of", lambda lm, hidden: lm.get_output_embeddings()(hidden)
            )
        case "attention":

            def attention(*args: Any, softcap: object = None, s_aux: object = None, **kwargs: Any):  # type: ignore[no-untyped-def]
                return packed_attention(*args, **kwargs)

            monkeypatch.setitem(AttentionInterface._global_mapping, PACKED, attention)


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("states", "qwen3_5"), ("states", "lfm2"), ("states", "bamba"), ("states", "minimax"),
        ("tail", "granite"), ("tail", "gemma2"), ("tail", "cohere"), ("tail", "falcon_h1"),
        ("attention", "gpt_oss"), ("attention", "gemma2"),
    ],
)  # fmt: skip
def test_the_probe_finds_what_was_wrong(
    what: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that runs on, a tail that is left out, an argument that is dropped: all refused."""
    config = family_page.family_config(name)
    config.name_or_path = f"without {what}"  # not the cached verdict
    broken(what, monkeypatch)
    with pytest.raises(ModelError, match="differ by"):
        family.check_family(config, "model")


def test_an_unknown_argument_of_the_attention_call_is_an_error() -> None:
    """None and False ask for nothing; anything else is named."""
    attention = torch.nn.Identity()
    query = torch.zeros(1, 2, 3, 4)
    for unknown in ({"position_bias": query}, {"is_causal": False}, {"indices": [1]}):
        with pytest.raises(ModelError, match=next(iter(unknown))):
            packed_attention(attention, query, query, query, None, **unknown)
    _, inputs = packed_inputs(shares_prompts=False)
    keys = torch.randn(1, 2, sum(inputs.bounds.lengths), 4)
    asked = {"position_bias": None, "output_attentions": False, "is_causal": True, "dropout": 0.1}
    packed_attention(attention, keys, keys, keys, None, bounds=inputs.bounds, **asked)


def test_noise_of_training_is_removed_but_stays_in_the_config() -> None:
    """GPT-2's default config has dropout of 0.1 in three places, OPT's also in functions."""
    for name in ("gpt2", "opt"):
        config = family_page.family_config(name)
        family.check_family(config, "model")  # in training mode, as on the ranks
        lm = family.build_trial(config)
        rates = {k: v for k, v in lm.config.to_dict().items() if "drop" in k and v}
        assert rates and max(rates.values()) == 0.1


def test_published_sizes_of_a_config_are_not_changed() -> None:
    """The trial is a copy."""
    config: PretrainedConfig = AutoConfig.for_model("qwen3_5")
    before = config.to_json_string()
    small = family.shrink(config).get_text_config()
    assert config.to_json_string() == before
    assert small.hidden_size == family.HIDDEN
    assert set(small.layer_types) == {"linear_attention", "full_attention"}
