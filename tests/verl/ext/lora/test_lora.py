"""Adapters on a frozen, shared base, compared with W + (alpha / r) B A, on one and two ranks."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from example.tiny import tiny_llama
from tests.core.batches import make_batch
from tests.verl.ext.lora import lora_bodies
from tests.verl.training import rank_bodies
from tests.verl.training.ranks import VOCAB, run_ranks, save_tiny
from verl.checkpoint import folders
from verl.checkpoint.exporting import export
from verl.config import ActorConfig, AdapterConfig, OptimConfig
from verl.errors import ConfigError
from verl.ext.lora.base import BASE_FILE
from verl.ext.lora.model import (
    AdaptedModel,
    Role,
    build_adapted_model,
    target_names,
)
from verl.model_files import weights_fingerprint
from verl.packing import split_by_work
from verl.training.actor import Actor, TokenBudgets
from verl.training.attention import PACKED
from verl.training.fsdp import FsdpOptions
from verl.training.shards import check_same_records, read_records

LINEAR = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
OPTIMIZER_STATE = ("step", "exp_avg", "exp_avg_sq")
RANKS = {"one": 1, "two": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Run the same training on one rank and on two, each writing all kinds of files."""
    root = tmp_path_factory.mktemp("runs")
    results = SimpleNamespace(model=save_tiny(root / "model"), root=root)
    for name, size in RANKS.items():
        out = root / name
        answers = run_ranks(size, lora_bodies.train, results.model, str(out))
        (out / "global_step_3.tmp" / folders.MARKER).touch()
        os.replace(out / "global_step_3.tmp", out / "global_step_3")
        setattr(results, name, answers)
    return results


def base_weights() -> dict[str, Tensor]:
    return dict(tiny_llama(VOCAB).named_parameters())


def merge_manually(
    parameters: dict[str, Tensor], name: str, alpha: float, rank: int
) -> LlamaForCausalLM:
    """Return the base with the adapter `name` added by a plain loop over its matrices."""
    model = tiny_llama(VOCAB)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            module = path.removesuffix(".weight")
            a = parameters.get(f"lm.{module}.lora_A.{name}.weight")
            b = parameters.get(f"lm.{module}.lora_B.{name}.weight")
            assert (a is None) == (not module.endswith("_proj"))
            if a is not None and b is not None:
                assert a.shape[0] == b.shape[1] == rank and b.abs().max() > 0
                weight += alpha / rank * (b @ a)
    return model


def log_probs(model: LlamaForCausalLM) -> list[Tensor]:
    """Compute log-probs of all sequences of the batch by unpacked forwards, 0 off the policy."""
    batch, outputs = make_batch(rank_bodies.LENGTHS, 0), []
    pairs = zip(batch.sequences("input_ids"), batch.sequences("policy_mask"), strict=True)
    for ids, mask in pairs:
        with torch.no_grad():
            rows = model(ids[None]).logits[0, :-1].log_softmax(-1)
        every = torch.cat([torch.zeros(1), rows.gather(-1, ids[1:, None])[:, 0]])
        outputs.append(torch.where(mask, every, 0.0))
    return outputs


def assert_results(answers: list[dict[str, Tensor]], key: str, expected: list[Tensor]) -> None:
    """Assert that each rank's result equals `expected` for the sequences of its shard."""
    parts = split_by_work(make_batch(rank_bodies.LENGTHS, 0), len(answers)).parts
    for answer, part in zip(answers, parts, strict=True):
        whole = torch.cat([expected[i] for i in part])
        torch.testing.assert_close(answer[key], whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", RANKS)
def test_the_policy_is_the_base_plus_scaled_b_a(runs: SimpleNamespace, name: str) -> None:
    """Log-probs after updates are those of a manual W + (alpha / r) B A."""
    answers = getattr(runs, name)
    model = merge_manually(answers[0]["stages"][-1], "actor", lora_bodies.ALPHA, lora_bodies.RANK)
    assert_results(answers, "log_probs", log_probs(model))
    with pytest.raises(AssertionError):
        assert_results(answers, "log_probs", log_probs(tiny_llama(VOCAB)))


@pytest.mark.parametrize("name", RANKS)
def test_the_reference_stays_the_base(runs: SimpleNamespace, name: str) -> None:
    """Its log-probs after updates are the initial model's, as the policy's were at the start."""
    answers, expected = getattr(runs, name), log_probs(tiny_llama(VOCAB))
    assert_results(answers, "ref_log_probs", expected)
    assert_results(answers, "before", expected)


@pytest.mark.parametrize("name", RANKS)
def test_the_critic_is_the_base_plus_its_own_adapter(runs: SimpleNamespace, name: str) -> None:
    """Values are the head's outputs for the hidden states of the base with the adapter `critic`."""
    answers = getattr(runs, name)
    parameters = answers[0]["stages"][-1]
    model = merge_manually(parameters, "critic", lora_bodies.ALPHA, 2)
    head, batch, expected = parameters["value_head.weight"], make_batch(rank_bodies.LENGTHS, 0), []
    pairs = zip(batch.sequences("input_ids"), batch.sequences("policy_mask"), strict=True)
    for ids, mask in pairs:
        with torch.no_grad():
            states = model.model(ids[None]).last_hidden_state[0]
        every = torch.cat([torch.zeros(1), (states @ head.T)[:-1, 0]])
        expected.append(torch.where(mask, every, 0.0))
    assert torch.cat(expected).abs().max() > 1e-3
    assert_results(answers, "values", expected)


@pytest.mark.parametrize("name", RANKS)
def test_an_update_changes_its_own_adapter_only(runs: SimpleNamespace, name: str) -> None:
    """Critic and actor are updated in turns; neither changes the base or the other."""
    stages = getattr(runs, name)[0]["stages"]
    for number, (old, new) in enumerate(itertools.pairwise(stages)):
        mine, other = ("critic", "actor") if number % 2 == 0 else ("actor", "critic")
        changed = {key for key, x in old.items() if not torch.equal(x, new[key])}
        assert changed and all(f".{mine}." in key or "value_head" in key for key in changed)
        assert not any(f".{other}." in key for key in changed)
        assert mine == "critic" or "value_head.weight" not in changed
    for path, weight in base_weights().items():
        module = path.removesuffix(".weight")
        final = stages[-1].get(f"lm.{path}", stages[-1].get(f"lm.{module}.base_layer.weight"))
        assert final is not None and torch.equal(final, weight)


def test_two_ranks_learn_as_one_does(runs: SimpleNamespace) -> None:
    """Losses and gradient norms do not depend on the number of ranks."""
    for one, two in zip(runs.one[0]["metrics"], runs.two[0]["metrics"], strict=True):
        keys = [k for k in one if not k.endswith(("num_micro_batches", "computed_token_share"))]
        assert [two[k] for k in keys] == pytest.approx([one[k] for k in keys], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", RANKS)
def test_merged_weights_have_the_trainers_log_probs(runs: SimpleNamespace, name: str) -> None:
    """Both transformers with the merged folder, and peft with the adapter on the base."""
    answers, root = getattr(runs, name), runs.root / name
    merged = LlamaForCausalLM.from_pretrained(root / "merged", dtype=torch.float32)
    assert_results(answers, "log_probs", log_probs(merged))
    assert (
        load_file(root / "merged/model.safetensors").keys()
        == load_file(Path(runs.model) / "model.safetensors").keys()
    )
    adapted = PeftModel.from_pretrained(tiny_llama(VOCAB), root / "adapter")
    assert_results(answers, "log_probs", log_probs(adapted))


@pytest.mark.parametrize("name", RANKS)
def test_an_export_is_what_the_ranks_wrote(
    runs: SimpleNamespace, name: str, tmp_path: Path
) -> None:
    """Merged or as an adapter, it is made from the checkpoint's small shards only."""
    step = runs.root / name / "global_step_3"
    merged = export(step, tmp_path / "merged", base=runs.model, dtype="float32")
    actual, expected = (
        load_file(p / "model.safetensors") for p in (merged, runs.root / name / "merged")
    )
    assert actual.keys() == expected.keys()
    for key, x in expected.items():
        torch.testing.assert_close(actual[key], x, rtol=0, atol=1e-6)
    alone = export(step, tmp_path / "adapter", adapter_only=True)
    for file in ("adapter_config.json", "adapter_model.safetensors", BASE_FILE):
        assert (alone / file).read_bytes() == (runs.root / name / "adapter" / file).read_bytes()
    assert json.loads((alone / BASE_FILE).read_text()) == {
        "fingerprint": weights_fingerprint(runs.model)
    }
    config = json.loads((alone / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (lora_bodies.RANK, lora_bodies.ALPHA)
    assert config["target_modules"] == LINEAR and config["base_model_name_or_path"] == runs.model


def test_a_checkpoint_has_trained_parameters_only(runs: SimpleNamespace) -> None:
    """Weights, two moments and steps of the adapters and the value head, but not the base."""
    reader = dcp.FileSystemReader(runs.root / "one/global_step_3/shards")
    saved = set(reader.read_metadata().state_dict_metadata)
    expected = {
        f"{role}.{kind}"
        for key in runs.one[0]["stages"][-1]
        for role in ("actor", "critic")
        if f".{role}." in key or (role == "critic" and key == "value_head.weight")
        for kind in (f"model.{key}", *(f"optimizer.{key}.{x}" for x in OPTIMIZER_STATE))
    }
    assert saved == expected


def test_a_resumed_run_continues_as_if_uninterrupted(runs: SimpleNamespace) -> None:
    """With other initial adapters and another number of ranks, the next update is the same."""
    root, before = runs.root / "two", runs.two[0]
    resumed = run_ranks(1, lora_bodies.resume, runs.model, str(root))[0]
    assert all(torch.equal(x, before["stages"][-1][key]) for key, x in resumed["stages"][0].items())
    for actual, expected in zip(resumed["next"], before["next"], strict=True):
        keys = [k for k in actual if not k.endswith(("num_micro_batches", "computed_token_share"))]
        assert [actual[k] for k in keys] == pytest.approx([expected[k] for k in keys], rel=1e-3)


def test_another_base_is_refused(runs: SimpleNamespace, tmp_path: Path) -> None:
    """Other weights of the same shape are an error that names them."""
    step, other = runs.root / "one/global_step_3", save_tiny(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError):
        export(step, tmp_path / "out", base=other)
    assert not (tmp_path / "out").exists()
    saved = read_records(step)
    with pytest.raises(ConfigError, match=r"all weights.*checkpoint's.*lora_rank=4"):
        check_same_records({"actor": saved["actor"]}, {})


@pytest.mark.usefixtures("single_rank")
def test_a_base_in_bfloat16_has_float32_adapters() -> None:
    """Only trained parameters are float32; frozen weights have the compute dtype."""
    lm = tiny_llama(VOCAB).to(torch.bfloat16)
    lm.set_attn_implementation(PACKED)
    config = ActorConfig(optim=OptimConfig(lr=1e-2))
    options = FsdpOptions(torch.bfloat16, 10, config.optim)
    adapters = {Role.ACTOR: AdapterConfig(lora_rank=2)}
    model = build_adapted_model(lm, adapters, torch.device("cpu"), options)
    metrics = Actor(model, config, TokenBudgets()).update(make_batch(rank_bodies.LENGTHS))
    assert metrics["actor/skipped_updates"] == 0 and metrics["actor/grad_norm"] > 0
    trained = model.full_trained_parameters()
    assert {x.dtype for x in trained.values()} == {torch.float32}
    frozen = {x.dtype for name, x in model.full_parameters() if name not in trained}
    assert frozen == {torch.bfloat16}
    assert all(x.abs().max() > 1e-3 for name, x in trained.items() if "lora_B" in name)


def test_target_modules_are_named_or_all_linear() -> None:
    """The output head is never a target, even if it is not tied; unknown names are errors."""
    lm = tiny_llama(VOCAB, tie_word_embeddings=False)
    assert target_names(lm, "all-linear") == LINEAR
    assert target_names(lm, ["v_proj", "q_proj"]) == ["q_proj", "v_proj"]
    for wrong in ("query", ["q_proj", "lm_head"], []):
        with pytest.raises(ConfigError, match="all-linear"):
            target_names(lm, wrong)


def test_a_model_uses_the_adapter_of_its_role() -> None:
    """Switching roles switches the active adapter, and all adapters stay trainable."""
    options = AdapterConfig(lora_rank=2, lora_alpha=4, target_modules=["q_proj"])
    model = AdaptedModel(tiny_llama(VOCAB), {Role.ACTOR: options, Role.CRITIC: options})
    layer = model.lm.model.layers[0].self_attn.q_proj
    for scale, role in ((1.0, "actor"), (2.0, "critic")):
        torch.nn.init.constant_(layer.lora_A[role].weight, 1.0)
        torch.nn.init.constant_(layer.lora_B[role].weight, scale)
    x = torch.ones(1, layer.in_features)
    plain = layer.base_layer(x)
    # (alpha / r) B A x = 2 · scale · r · in_features
    for role, scale in ((Role.ACTOR, 1.0), (Role.REFERENCE, 0.0), (Role.CRITIC, 2.0)):
        model.use(role)
        expected = plain + 2 * scale * 2 * layer.in_features
        torch.testing.assert_close(layer(x), expected)
        assert all(p.requires_grad == ("lora_" in n) for n, p in model.lm.named_parameters())
