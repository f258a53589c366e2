"""A probe of model families: whether the packed forward pass is the model's own.

Ranks compute many sequences in one row, behind one copy of a group's prompt. That is right only if
nothing but attention lets tokens see each other, attention has no arguments that are dropped, and
nothing but the head follows the trunk. `check_family` tries it on a small model with the config of
the one that will be trained: a few layers of each kind, random weights, about a second.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from verl.batch import TokenBatch
from verl.errors import ModelError, explain
from verl.model_files import describe_error, quiet_transformers
from verl.packing import share_prompts
from verl.remote_code import trusts_remote_code
from verl.training.attention import PACKED
from verl.training.mixers import mixers
from verl.training.models import LogProbModel, PackedInputs, trunk_of
from verl.types import Draw, Origin, Prompt, Segment, Trajectory

TOLERANCE = 1e-3
"""Largest difference of log-probs in float32, in nats."""
VOCABULARY, HIDDEN, HEADS, HEAD_DIM, SMALL, WINDOW = 64, 64, 4, 32, 16, 6
GROUPS = (("a", 7, (5, 1, 12)), ("b", 4, (6,)), ("c", 9, (3, 8)))
"""Groups of the trial: name, tokens of the prompt, tokens of each response."""
FAMILIES = "docs/guides/models.md"

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_size": HIDDEN, "word_embed_proj_dim": HIDDEN, "lru_width": HIDDEN,
    "num_attention_heads": HEADS, "num_heads": HEADS, "head_dim": HEAD_DIM, "rotary_dim": 8,
    "attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HIDDEN // HEADS,
    "initializer_range": 0.2, "init_std": 0.2,
    "sliding_window": WINDOW, "attention_chunk_size": WINDOW, "attention_window_size": WINDOW,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": SMALL, "kv_lora_rank": SMALL, "qk_rope_head_dim": 8, "qk_nope_head_dim": SMALL,
    "qk_head_dim": 8 + SMALL, "v_head_dim": SMALL, "num_nextn_predict_layers": 0,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_n_heads": 8, "mamba_d_head": SMALL, "mamba_num_heads": 8, "mamba_head_dim": SMALL,
    "n_mamba_heads": 8, "mamba_headdim": SMALL, "mamba_d_ssm": 8 * SMALL, "mamba_expand": 2,
    "mamba_d_state": 8, "ssm_state_size": 8, "state_size": 8, "mamba_n_groups": 1,
    "mamba_ngroups": 1, "n_groups": 1, "mamba_chunk_size": 4, "chunk_size": 4, "mamba_dt_rank": 4,
    "time_step_rank": 4, "altup_num_inputs": 2, "laurel_rank": 4, "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
}  # fmt: skip
"""Sizes of the trial, for the entries that a config has and that are not null in it."""
AT_MOST: Mapping[str, int] = {
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "top_k": 2,
}  # fmt: skip
WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "feed_forward")
"""Parts of the names of widths inside a layer."""
LAYERS = ("num_hidden_layers", "depth", "num_layers", "encoder_layers")


def check_family(config: PretrainedConfig, subject: str) -> None:
    """Raise ModelError, which begins with `subject`, unless the packed pass is the model's own.

    A difference, and a model that cannot be tried, are refused.
    """
    family = config.get_text_config().model_type
    problem, _ = _try_family(_Config(config))
    if problem:
        raise ModelError(explain(subject, f"a model of the family {family}, {problem}",
                                 f"log-probs within {TOLERANCE:g} nats of the model's own",
                                 f"train another family ({FAMILIES}), or report it"))  # fmt: skip


def layers_with_state(config: PretrainedConfig) -> str:
    """Return the names of a model's layers that carry a state along the row, or ""."""
    return _try_family(_Config(config))[1]


class _Config:
    """A config that compares by its content, for the cache."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.key = json.dumps(config.to_dict(), sort_keys=True, default=str)
        self.config = config

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Config) and self.key == other.key


@functools.cache
def _try_family(wrapped: _Config) -> tuple[str, str]:
    """Return what is wrong with the family, or "", and the names of its layers with a state."""
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        try:
            lm = build_trial(wrapped.config)
            states = ", ".join(sorted({type(m).__name__ for m in mixers(trunk_of(lm))}))
            found = differences(lm)
        except ModelError as error:
            return f"whose {error}", ""
        # Building and calling a model of any family can raise anything.
        except Exception as error:  # noqa: BLE001
            return f"which cannot be tried: {describe_error(error)}", ""
    for name, difference in found.items():
        if not difference <= TOLERANCE:
            kinds = ", ".join(sorted(layer_kinds(lm))) or type(lm).__name__
            return (
                f"whose log-probs differ by {difference:.2g} nats {name} (layers: {kinds})",
                states,
            )
    return "", states


def layer_kinds(lm: PreTrainedModel) -> set[str]:
    """Return the classes of the parts of a model's blocks that let tokens see each other."""
    kinds = [getattr(m, "layer_type", None) or type(m).__name__ for m in mixers(lm)]
    kinds += getattr(lm.config.get_text_config(), "layer_types", None) or []
    kinds += [type(m).__name__ for m in lm.modules() if type(m).__name__.endswith("Attention")]
    return set(kinds)


def differences(lm: PreTrainedModel) -> dict[str, float]:
    """Return the largest difference of log-probs, in nats: packed, and behind shared prompts.

    The model is in training mode, as on the ranks.
    """
    batch = trial_batch()
    with torch.no_grad():
        expected = torch.cat(list(own_log_probs(lm.eval(), batch)))
        lm.set_attn_implementation(PACKED)
        if lm.config.get_text_config()._attn_implementation != PACKED:
            raise ModelError("attention has no boundaries and cannot be replaced")
        model, found = LogProbModel(lm).train(), {}
        for name in ("in a packed row", "behind a shared prompt"):
            mask = batch.tokens["policy_mask"]
            inputs = PackedInputs.of(batch, mask, torch.device("cpu"))
            found[name] = float((model(inputs, 1.0)[0] - expected).abs().max())
            share_prompts(batch)
    return found


def own_log_probs(lm: PreTrainedModel, batch: TokenBatch) -> Iterator[Tensor]:
    """Yield the log-probs of each sequence's policy tokens by the model's forward on it alone."""
    ids, mask = batch.tokens["input_ids"], batch.tokens["policy_mask"].bool()
    for start, length in zip(batch.offsets.tolist(), batch.lengths.tolist(), strict=False):
        own = slice(start, start + length)
        logits = lm(input_ids=ids[own][None], use_cache=False).logits[0]
        log_probs = torch.log_softmax(logits[:-1], -1)
        targets = ids[own][1:]
        yield log_probs.gather(-1, targets[:, None])[:, 0][mask[own][1:]]


def trial_batch() -> TokenBatch:
    """Return a batch of `GROUPS` with random ids."""
    generator = torch.Generator().manual_seed(0)

    def ids(number: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, VOCABULARY, (number,), generator=generator).tolist())

    trajectories = []
    for name, prompt_length, lengths in GROUPS:
        prompt = ids(prompt_length)
        for sample, length in enumerate(lengths):
            response = ids(length)
            segments = [Segment(Origin.PROMPT, prompt, ""),
                        Segment(Origin.POLICY, response, "", (0.0,) * length)]  # fmt: skip
            trajectories.append(
                Trajectory(Prompt(name, prompt, "", ()), segments, draw=Draw(name, sample))
            )
    return TokenBatch.from_trajectories(trajectories)


def remove_noise(lm: PreTrainedModel) -> PreTrainedModel:
    """Set dropout and the noise of routers to 0: log-probs of training are those of sampling.

    The config, which is exported with the model, stays as it is.
    """
    for module in lm.modules():
        for name, value in vars(module).items():
            is_noise = "drop" in name or "jitter" in name or isinstance(module, nn.Dropout)
            if is_noise and isinstance(value, float):
                setattr(module, name, 0.0)
    return lm


def build_trial(config: PretrainedConfig) -> PreTrainedModel:
    """Build a small model of the config's family, with random weights, in float32."""
    lm: PreTrainedModel = AutoModelForCausalLM.from_config(
        shrink(config), attn_implementation="eager", dtype=torch.float32,
        trust_remote_code=trusts_remote_code(),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in lm.parameters():  # a weight that is 0 or 1 hides what it multiplies
            parameter.add_(0.1 * torch.randn_like(parameter))
    return remove_noise(lm)


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of the config with small sizes and a few layers of each kind."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None and part is not text:
            _set(part, dict.fromkeys(LAYERS, 1))
    heads, kv_heads = (
        getattr(text, f"num_{x}", None) for x in ("attention_heads", "key_value_heads")
    )
    head_dim = vars(text).get("head_dim")
    is_square = head_dim is None or head_dim * (heads or 0) == text.hidden_size
    _keep_layers(text)
    values = getattr(text, "linear_num_value_heads", None) or 0
    ratio = values // (getattr(text, "linear_num_key_heads", None) or 1)
    _set(text, SIZES)
    _set(
        text,
        {name: min(count, getattr(text, name, None) or count) for name, count in AT_MOST.items()},
    )
    _set(text, {name: 3 * SMALL for name in vars(text) if any(width in name for width in WIDTHS)})
    _set(text, {"linear_num_value_heads": 2 * min(ratio, 2)})
    if getattr(text, "qk_rope_head_dim", None):
        _set(text, {"head_dim": text.qk_rope_head_dim})
    if kv_heads is not None:
        shared = {True: HEADS, False: 1 if kv_heads == 1 else 2}
        text.num_key_value_heads = shared[kv_heads == heads]
    if head_dim is not None and is_square:
        text.head_dim = HIDDEN // HEADS
    _shrink_rope(text, HIDDEN // HEADS if is_square else HEAD_DIM)
    return config


def _set(config: PretrainedConfig, sizes: Mapping[str, Any]) -> None:
    """Set the entries that the config has as a number, or as a list of one number per layer."""
    names = {config.attribute_map.get(name, name): value for name, value in sizes.items()}
    for name, value in names.items():
        before = vars(config).get(name)
        if isinstance(before, list) and before and isinstance(before[0], int):
            setattr(config, name, [value] * len(before))
        elif before is not None and not isinstance(before, bool):
            setattr(config, name, value)


def _keep_layers(text: PretrainedConfig) -> None:
    """Keep the first two layers of each kind, in their order; lists with an entry per layer too."""
    num_layers = text.num_hidden_layers
    lists = {name: value for name, value in vars(text).items()
             if isinstance(value, list | tuple) and len(value) == num_layers > 2}  # fmt: skip
    kinds = list(zip(*(map(str, value) for value in lists.values()), strict=True))
    kept = [i for i in range(num_layers) if (kinds[:i].count(kinds[i]) < 2 if kinds else i < 4)]
    kept = kept[:8] if kinds else kept
    for name, value in lists.items():
        setattr(text, name, [value[i] for i in kept])
    pattern = vars(text).get("hybrid_override_pattern")
    if isinstance(pattern, str) and len(pattern) == num_layers:
        text.hybrid_override_pattern = "".join(pattern[i] for i in kept)
    for period, offset in (("attn_layer_period", "attn_layer_offset"),
                           ("expert_layer_period", "expert_layer_offset")):  # fmt: skip
        if getattr(text, period, None):
            setattr(text, period, 2)
            setattr(text, offset, 1)
    if getattr(text, "attn_layer_indices", None):
        text.attn_layer_indices = [1, 3]
    text.num_hidden_layers = len(kept)


def _shrink_rope(text: PretrainedConfig, head_dim: int) -> None:
    """Shorten what the rotary embedding has per pair of dimensions."""
    rotary_dim = getattr(text, "qk_rope_head_dim", None) or head_dim
    rope = getattr(text, "rope_parameters", None)
    parts = [rope, *(rope or {}).values()]
    for part in parts:
        if not isinstance(part, dict):
            continue
        share = part.get("partial_rotary_factor") or getattr(text, "partial_rotary_factor", None)
        pairs = int(rotary_dim * (share or 1.0)) // 2
        for name in ("short_factor", "long_factor"):
            if part.get(name):
                part[name] = list(part[name][:pairs])
        if part.get("mrope_section"):
            part["mrope_section"] = _divide(pairs, part["mrope_section"])


def _divide(total: int, section: Sequence[int]) -> list[int]:
    """Divide `total` in the proportions of `section`; earlier parts get what is left."""
    shares = [total * size // sum(section) for size in section]
    for i in range(total - sum(shares)):
        shares[i % len(shares)] += 1
    return shares
