"""Names that the scripts and YAML files of the original and veRL use, and what each becomes here.

An option means the same under another name (`ALIASES`), has no effect any more and says so once, or
is refused with what to give instead, where leaving it out would train something else than was asked
for (`LEGACY`). `python -m verl.config.legacy` prints the tables of docs/configuration.md.
Nothing here parses a command line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "data.shuffle": "data.shuffle_train_dataloader",
        "actor_rollout_ref.rollout.n": "actor_rollout_ref.rollout.n_agent",
        "actor_rollout_ref.actor.optim.warmup_steps_ratio": (
            "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio"
        ),
        "critic.optim.warmup_steps_ratio": "critic.optim.lr_warmup_steps_ratio",
        "critic.fsdp_config": "critic.model.fsdp_config",
        "trainer.max_actor_ckpt_to_keep": "trainer.keep_last",
    }
)
"""Other names of our options and sections."""


@dataclass(frozen=True)
class Legacy:
    """An option without effect; `silent` are the values that ask for nothing else than we do."""

    advice: str
    silent: tuple[Any, ...] = (None,)
    is_refused: bool = False
    """Any other value fails instead of warning: without it the run would not be the one meant."""


def refused(advice: str, *silent: Any) -> Legacy:
    """An option whose other values fail."""
    return Legacy(advice, (*silent, None), is_refused=True)


_LOG_PROB = Legacy("set actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu (tokens)")
_MICRO = Legacy(
    "set ppo_max_token_len_per_gpu: that many times data.max_prompt_length + "
    "data.max_response_length"
)
_ENGINE = Legacy("the engine's lengths follow data.max_prompt_length and max_response_length")
_VLLM = Legacy("the engine decides; drop it", (False, None))
_DROP = Legacy("drop it", (False, None))
_CODE = refused("take a model that transformers knows; no code beside a model is run", False)
_REWARD = Legacy("it belongs to reward_model.enable; drop it")
_COLUMN = refused("set it in the data: the columns are in docs/data.md", "data_source")

_ROWS: tuple[tuple[str, Legacy], ...] = (
    ("actor_rollout_ref.model.use_remove_padding critic.model.use_remove_padding",
     Legacy("batches are never padded; drop it", (True, None))),
    ("actor_rollout_ref.{actor,ref}.fsdp_config.grad_offload critic.model.fsdp_config.grad_offload",
     Legacy("gradients go with fsdp_config.param_offload; set that", (False, None))),
    ("actor_rollout_ref.ref.fsdp_config.optimizer_offload",
     Legacy("the reference has no optimizer; drop it", (False, None))),
    ("actor_rollout_ref.{actor,ref}.fsdp_config.offload_policy "
     "critic.model.fsdp_config.offload_policy",
     Legacy("set fsdp_config.param_offload", (False, None))),
    ("actor_rollout_ref.{actor,ref}.fsdp_config.fsdp_size critic.model.fsdp_config.fsdp_size",
     Legacy("parameters are sharded over all ranks; drop it", (-1, None))),
    ("actor_rollout_ref.{actor,ref}.fsdp_config.wrap_policy critic.model.fsdp_config.wrap_policy",
     Legacy("each block of the model is sharded by itself; drop it", (0, {}, None))),
    ("actor_rollout_ref.{actor,ref}.fsdp_config.reshard_after_forward "
     "critic.model.fsdp_config.reshard_after_forward",
     Legacy("a block is sharded again after its forward; drop it", (True, None))),
    ("actor_rollout_ref.{actor,ref}.ulysses_sequence_parallel_size "
     "critic.ulysses_sequence_parallel_size",
     Legacy("a sequence stays on one GPU; for memory lower ppo_max_token_len_per_gpu, or set "
            "fsdp_config.param_offload=true", (1, None))),
    ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu critic.ppo_micro_batch_size_per_gpu",
     _MICRO),
    ("actor_rollout_ref.{rollout,ref}.{log_prob_micro_batch_size,log_prob_micro_batch_size_per_gpu}"
     " actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"
     " critic.{forward_micro_batch_size,forward_micro_batch_size_per_gpu}"
     " critic.forward_max_token_len_per_gpu", _LOG_PROB),
    ("actor_rollout_ref.actor.use_dynamic_bsz critic.use_dynamic_bsz "
     "actor_rollout_ref.{rollout,ref}.log_prob_use_dynamic_bsz",
     Legacy("batches are always packed by tokens; set ppo_max_token_len_per_gpu")),
    ("trainer.balance_batch", Legacy("tokens are always balanced over ranks; drop it",
                                     (True, None))),
    ("trainer.default_hdfs_dir", Legacy("copy trainer.default_local_dir after the run")),
    ("data.tokenizer critic.model.tokenizer_path",
     Legacy("the tokenizer is the one beside actor_rollout_ref.model.path")),
    ("data.{return_raw_input_ids,return_raw_chat} actor_rollout_ref.rollout.ignore_eos", _DROP),
    ("data.truncation",
     Legacy("no prompt is cut: those over data.max_start_length are left out, or refused with "
            "data.filter_overlong_prompts=false", ("error", None))),
    ("data.{filter_overlong_prompts_workers,image_key,video_key} ray_init "
     "actor_rollout_ref.{actor,ref}.use_torch_compile critic.rollout_n",
     Legacy("drop it", (False, 1, "images", "videos", None))),
    ("data.reward_fn_key", _COLUMN),
    ("data.custom_cls", refused("write rows as docs/data.md has them")),
    ("actor_rollout_ref.hybrid_engine", Legacy("drop it", (True, None))),
    ("actor_rollout_ref.{actor,ref}.strategy critic.strategy",
     Legacy("FSDP2 is the only one", ("fsdp", "fsdp2", None))),
    ("actor_rollout_ref.model.override_config critic.model.override_config",
     refused("write it into config.json in the model's folder", {})),
    ("actor_rollout_ref.model.{external_lib,trust_remote_code} "
     "critic.model.{external_lib,trust_remote_code} data.trust_remote_code", _CODE),
    ("actor_rollout_ref.model.{use_liger,use_fused_loss,use_shm,return_last_hidden_state}", _DROP),
    ("actor_rollout_ref.actor.shuffle critic.shuffle",
     Legacy("mini-batches are always drawn at random; drop it", (True, None))),
    ("actor_rollout_ref.actor.optim.{warmup_style,min_lr_ratio} "
     "critic.optim.{warmup_style,min_lr_ratio}",
     refused("drop it: the rate stays constant after its warm-up", "constant", 0)),
    ("actor_rollout_ref.actor.optim.lr_warmup_steps critic.optim.lr_warmup_steps",
     refused("set lr_warmup_steps_ratio", -1, 0)),
    ("actor_rollout_ref.actor.optim.total_training_steps critic.optim.total_training_steps",
     Legacy("set trainer.total_training_steps", (-1, None))),
    ("actor_rollout_ref.actor.clip_ratio_low",
     refused("set actor_rollout_ref.actor.clip_ratio, which holds below 1, and above 1 unless "
             "clip_ratio_high is set")),
    ("actor_rollout_ref.actor.checkpoint critic.checkpoint",
     Legacy("a checkpoint holds all that a run needs; python -m verl.checkpoint export makes a "
            "Hugging Face folder of it")),
    ("actor_rollout_ref.rollout.{prompt_length,response_length,max_model_len,"
     "max_num_batched_tokens}", _ENGINE),
    ("actor_rollout_ref.rollout.{top_k,val_kwargs.top_k}",
     refused("narrow sampling with top_p; every token may be sampled", -1, 0)),
    ("actor_rollout_ref.rollout.do_sample",
     refused("drop it: training samples; rollout.val_kwargs.temperature=0 is greedy", True)),
    ("actor_rollout_ref.rollout.val_kwargs.do_sample",
     Legacy("set rollout.val_kwargs.temperature: 0 is greedy", (False, None))),
    ("actor_rollout_ref.rollout.val_kwargs.n",
     refused("drop it: validation plays a question once (more often: docs/evaluation.md)", 1)),
    ("actor_rollout_ref.rollout.load_format", Legacy("weights come from the trainer")),
    ("actor_rollout_ref.rollout.free_cache_engine",
     Legacy("the engine always gives its memory back while ranks train; drop it", (True, None))),
    ("actor_rollout_ref.rollout.{mode,chat_scheduler}",
     Legacy("dialogues always run side by side; drop it", ("sync", "async", None))),
    ("actor_rollout_ref.rollout.{disable_log_stats,enable_chunked_prefill,use_fire_sampling,"
     "engine_kwargs}", _VLLM),
    ("actor_rollout_ref.rollout.multi_turn",
     refused("set max_turns, template and retriever.url; every dialogue has turns", False, {})),
    ("reward_model.enable",
     refused("choose a rule or a judge with reward_model.name (docs/rewards.md)", False)),
    ("reward_model.{strategy,model,micro_batch_size,micro_batch_size_per_gpu,max_length,"
     "ulysses_sequence_parallel_size,use_dynamic_bsz,forward_max_token_len_per_gpu,"
     "launch_reward_fn_async}", _REWARD),
    ("reward_model.reward_manager", refused("choose with reward_model.name", "naive")),
    ("custom_reward_function",
     refused("set reward_model.name=path/to/file.py:function (docs/rewards.md)", "compute_score")),
    ("algorithm.use_kl_in_reward",
     refused("algorithm.kl_ctrl.kl_coef=0 takes KL out of the reward", True)),
    ("algorithm.state_masking",
     Legacy("tokens are masked by who wrote them; actor_rollout_ref.actor.state_masking=false "
            "trains on all", ("<information>", "</information>", None))),
    ("reranker",
     refused("let the server of retriever.url reorder what it finds (docs/retriever.md)", False)),
    ("trainer.resume_from_path", refused("set trainer.resume_mode to that path")),
    ("trainer.{max_critic_ckpt_to_keep,del_local_ckpt_after_load}",
     Legacy("set trainer.keep_last", (False, None))),
    ("trainer.{log_val_generations,validation_data_dir}",
     Legacy("docs/evaluation.md plays a file of questions and keeps each dialogue", (0, None))),
    ("trainer.ray_wait_register_center_timeout", Legacy("set trainer.node_timeout (seconds)")),
)  # fmt: skip
"""Names, several for one advice; `{a,b}` stands for each of them. A name covers all below it."""


def expand(names: str) -> Iterator[str]:
    """The dotted names that a row's names stand for.

    *Example*: `"x.{a,b} y"` gives `x.a`, `x.b` and `y`.
    """
    for name in names.split():
        found = re.search(r"\{(.*?)\}", name)
        if found is None:
            yield name
            continue
        for part in found[1].split(","):
            yield from expand(name.replace(found[0], part, 1))


LEGACY: Mapping[str, Legacy] = MappingProxyType(
    {name: legacy for names, legacy in _ROWS for name in expand(names)}
)
"""What has no effect here, by dotted name; some are still options of `verl.config`."""


def name_here(given: str) -> str:
    """Our name of an option that was given under another one."""
    for other, ours in ALIASES.items():
        if given == other or given.startswith(f"{other}."):
            return ours + given.removeprefix(other)
    return given


def find(key: str) -> Legacy | None:
    """What is known of an option without effect, or of a section that it stands in."""
    while key and key not in LEGACY:
        key = key.rpartition(".")[0]
    return LEGACY.get(key)


def tables() -> str:
    """The names as Markdown, a table for each of the three things that may become of them."""
    parts = ["| Given | Means |", "|---|---|"]
    parts += [f"| `{given}` | `{ours}` |" for given, ours in ALIASES.items()]
    for title, is_refused in (
        ("These have no effect, and say so once where they ask for something:", False),
        ("These are refused unless they ask for what is done anyway:", True),
    ):
        parts += ["", title, "", "| Option | Instead |", "|---|---|"]
        for names, legacy in _ROWS:
            if legacy.is_refused is is_refused:
                cell = ", ".join(f"`{name}`" for name in names.split())
                parts.append(f"| {cell} | {legacy.advice} |")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(tables())
