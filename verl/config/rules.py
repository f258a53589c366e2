"""Rules between options: one row each, of what is wrong, the option, got, expected, fix.

What concerns one option alone stands in its field. An option that another one leaves without effect
is refused too, so that no run is taken for what it is not. Names of rewards are known to
their own package alone, which refuses unknown ones before the run starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from verl.config import Config
from verl.config.agent import EMPTY_URL, ServerConfig
from verl.config.policy import ActorConfig
from verl.config.reward import RewardConfig, StageConfig
from verl.core_algos.advantages import ADVANTAGES
from verl.errors import explain
from verl.plugins import PYTHON_PREFIX

Row = tuple[object, str, object, str, str]
"""Whether it is a problem; subject, got, expected, fix."""
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
HTTP = ("http://", "https://")
READERS = {
    "format_score": "em",
    "structure_format_score": "em_format",
    "final_format_score": "em_format",
    "retrieval_score": "em_format",
    "correct_answer": "em_cost",
    "search_penalty": "em_cost",
    "invalid_format": "em_cost",
    "penalise_correct_only": "em_cost",
}
"""The reward that reads each partial score."""
PLACEHOLDERS = ("{question}", "{accepted}", "{answer}")


def problems(config: Config) -> Iterator[str]:
    """All that cannot work together, a sentence each."""
    sections = (_lists, _run, _sequence_parallel, _recorded, _engines, _savings, _servers, _critic,
                _algorithm, _losses, _shaping, _server, _rewards, _stages, _judge)  # fmt: skip
    rows = itertools.chain.from_iterable(section(config) for section in sections)
    for is_wrong, subject, got, expected, fix in rows:
        if is_wrong:
            yield explain(subject, got, expected, fix)


# Each row is one thing to read: the formatter would give every string a line of its own.
# fmt: off
def _lists(config: Config) -> Iterator[Row]:
    """What a dataclass can only call `Any`, and how many numbers there are."""
    policy = config.actor_rollout_ref
    texts = {
        "data.train_files": config.data.train_files, "data.val_files": config.data.val_files,
        "trainer.logger": config.trainer.logger,
        "actor_rollout_ref.model.target_modules": policy.model.target_modules,
        "critic.model.target_modules": config.critic.model.target_modules,
    }
    if policy.rollout.url is not None:
        texts[f"{ROLLOUT}.url"] = policy.rollout.url
    for key, given in texts.items():
        parts = [given] if isinstance(given, str) else given
        is_text = isinstance(parts, list) and all(isinstance(p, str) and p for p in parts)
        is_read = "_files" not in key or config.samples_rollouts
        is_none = is_read and not parts
        yield (not is_text or is_none, key, repr(given), "a text, or a list of texts",
               f"leave {key} out" if "files" not in key else f"{key}=FILE.parquet")
    for key, betas in ((ACTOR, policy.actor.optim.betas), ("critic", config.critic.optim.betas)):
        yield (len(betas) != 2, f"{key}.optim.betas", list(betas), "two numbers",
               f"{key}.optim.betas=[0.9,0.999]")


def _run(config: Config) -> Iterator[Row]:
    """Budgets hold a dialogue; ranks, engines and the guard have what they need."""
    data, trainer, rollout = config.data, config.trainer, config.actor_rollout_ref.rollout
    longest, batch = data.max_prompt_length, config.actor_rollout_ref.actor.ppo_mini_batch_size
    start, seen = data.max_start_length, data.max_obs_length
    yield (not trainer.default_local_dir.strip(), "trainer.default_local_dir",
           repr(trainer.default_local_dir), "a folder", "leave it out, or name one: . for this one")
    yield (start > longest, "data.max_start_length",
           f"{start}, more than data.max_prompt_length={longest}", "a prompt that fits the context",
           "raise data.max_prompt_length or lower data.max_start_length")
    yield (config.calls_tools and seen >= longest, "data.max_obs_length",
           f"{seen}, not less than max_prompt_length={longest}",
           "room for the prompt beside one observation",
           "raise data.max_prompt_length or lower data.max_obs_length")
    usual, step = ActorConfig.ppo_mini_batch_size, config.num_trajectories
    for key, size in ((ACTOR, batch), ("critic", config.critic.ppo_mini_batch_size or usual)):
        yield (size > step and size != usual, f"{key}.ppo_mini_batch_size", size,
               f"at most the {step} trajectories of a step, or {usual}, the default, for all",
               f"{key}.ppo_mini_batch_size={step}")
    yield (rollout.temperature == 0 and not trainer.val_only, f"{ROLLOUT}.temperature", 0,
           "more than 0: training needs samples that differ",
           f"{ROLLOUT}.temperature=1.0 (validation has its own: rollout.val_kwargs.temperature)")
    yield (not trainer.best_metric.startswith("val/"), "trainer.best_metric", trainer.best_metric,
           "a metric of validation, val/…", "trainer.best_metric=val/score")
    goes_back = trainer.guard.enable and trainer.guard.action == "rollback"
    yield (goes_back and trainer.save_freq < 1, "trainer.save_freq", trainer.save_freq,
           "1 or more: a rollback needs checkpoints to go back to",
           "trainer.save_freq=10, or trainer.guard.action=stop")


def _sequence_parallel(config: Config) -> Iterator[Row]:
    """Group sizes that divide the ranks, and mini-batches with a trajectory for each group."""
    actor, critic, name = config.actor_rollout_ref.actor, config.critic, "trainer.n_gpus_per_node"
    holders = [(ACTOR, name, "", config.num_ranks, actor.ulysses_sequence_parallel_size)]
    if config.has_own_critic:
        name, whose = "critic.n_gpus_per_node", "the critic's "
        holders.append(("critic", name, whose, config.num_critic_ranks, config.critic_sp_size))
    elif critic.ulysses_sequence_parallel_size:
        holders.append(("critic", name, "", config.num_ranks, config.critic_sp_size))
    for section, gpus, whose, ranks, size in holders:
        key, num_groups = f"{section}.ulysses_sequence_parallel_size", max(1, ranks // size)
        yield (ranks % size, key, size, f"a divisor of {whose}{ranks} ranks",
               f"{key}=1, or another {gpus}")
        batch = actor.ppo_mini_batch_size
        if section == "critic":
            batch = critic.ppo_mini_batch_size or batch
        number = str(num_groups)
        if size > 1:
            number = f"{num_groups} sequence-parallel groups of {size}"
        yield (batch < num_groups and not config.trainer.val_only, f"{section}.ppo_mini_batch_size",
               batch, f"one trajectory or more for each of {whose}{number} ranks",
               f"{section}.ppo_mini_batch_size={num_groups}, or fewer {gpus}")


def _recorded(config: Config) -> Iterator[Row]:
    """Nothing samples where trajectories were recorded."""
    data, trainer, rollout = config.data, config.trainer, config.actor_rollout_ref.rollout
    key, is_recorded = "data.rollouts", not config.samples_rollouts
    yield (data.rescore and not is_recorded, "data.rescore", True,
           f"false: scores are those of a record only with {key}", f"{key}=FOLDER beside it")
    needs_greedy = ADVANTAGES[config.algorithm.adv_estimator].needs_greedy
    yield (data.rescore and needs_greedy, "data.rescore", True,
           "false: of greedy trajectories, scores alone were recorded", "data.rescore=false")
    idle = {"trainer.val_only": trainer.val_only, "trainer.rollout_gpus": trainer.rollout_gpus,
            "trainer.rollout_data_dir": trainer.rollout_data_dir,
            f"{ROLLOUT}.replay": rollout.replay}
    for name, given in idle.items():
        yield (is_recorded and bool(given), name, given,
               f"nothing: {key} learns from what was sampled, without engines", "leave it out")
    yield (is_recorded and trainer.test_freq > 0, "trainer.test_freq", trainer.test_freq,
           f"0: with {key} there are no engines to validate with",
           "trainer.test_freq=0, and search-r1 evaluate for the trained model")


def _engines(config: Config) -> Iterator[Row]:
    """Engines fill the GPUs that they lie on: the ranks', or their own."""
    trainer, rollout, is_split = config.trainer, config.actor_rollout_ref.rollout, config.is_split
    size, per_node = rollout.tensor_model_parallel_size, config.engine_gpus_per_node
    key = "trainer.rollout_gpus"
    holder = key if is_split else "trainer.n_gpus_per_node"
    yield (per_node % size, f"{ROLLOUT}.tensor_model_parallel_size", size,
           f"a divisor of {holder}={per_node}", f"{ROLLOUT}.tensor_model_parallel_size=1")
    yield (is_split and rollout.name == "remote", key, trainer.rollout_gpus,
           f"0: {ROLLOUT}.name=remote is a server with devices of its own", f"{key}=0")
    reasons = {"max_staleness": rollout.max_staleness > 0, "trainer.rollout_gpus": is_split,
               "url": config.is_external}  # fmt: skip
    apart = [name for name, given in reasons.items() if given]
    sync = f"{ROLLOUT}.weight_sync"
    yield (rollout.weight_sync == "ipc" and bool(apart), sync, "ipc",
           f"files with {', '.join(apart)}: only engines that wait on the ranks' own devices "
           "receive weights",
           f"{sync}=files" if config.is_colocated or config.is_external else f"{sync}=nccl")
    is_nccl = rollout.weight_sync == "nccl"
    yield (is_nccl and not is_split, sync, "nccl",
           "files or ipc: it is for engines of the run on devices of their own",
           f"{key}=N beside fewer trainer.n_gpus_per_node, or {sync}=files")
    yield (rollout.weight_delta and not is_nccl, f"{ROLLOUT}.weight_delta", "true",
           f"false with {sync}={rollout.weight_sync}, which writes or shows whole weights",
           f"{sync}=nccl with {key}=N, or leave weight_delta out")
    waits_long = rollout.max_staleness > 0 and not rollout.partial
    yield (is_nccl and waits_long, f"{ROLLOUT}.partial", "false",
           f"true with {sync}=nccl: ranks would wait until engines have ended whole trajectories",
           f"{ROLLOUT}.partial=true, or {sync}=files")
    must_wait = not rollout.partial or rollout.max_staleness == 0
    yield (rollout.interrupt_turns and must_wait, f"{ROLLOUT}.interrupt_turns", "true",
           "false: without max_staleness, or with partial=false, no weights come in a turn",
           f"{ROLLOUT}.max_staleness=1 and partial=true beside it")


def _savings(config: Config) -> Iterator[Row]:
    """Engines that guess tokens, or compute in 8 bits, and what must stand beside it."""
    rollout = config.actor_rollout_ref.rollout
    guess, key = rollout.speculative_config, f"{ROLLOUT}.speculative_config"
    options = ((f"{key}.method", guess.method, None),
               (f"{ROLLOUT}.quantization", rollout.quantization, None),
               (f"{ROLLOUT}.kv_cache_dtype", rollout.kv_cache_dtype, "auto"))
    is_ours = rollout.name == "vllm" and not config.is_external
    for name, given, usual in options:
        word = "null" if usual is None else usual
        yield (given != usual and not is_ours, name, given,
               f"{word}: it is an option of vLLM engines that the run starts",
               f"{name}={word}; a server of your own has it by vllm serve")
    for name, given, usual in options[1:]:
        is_corrected = config.reads_engine_log_probs or config.trainer.val_only
        yield (given != usual and not is_corrected, name, given,
               "a correction beside it: engine and trainer then differ by more than rounding",
               f"{ACTOR}.rollout_is=token, or {ACTOR}.old_log_probs=engine")
    yield (guess.method is not None and config.trainer.deterministic, f"{key}.method", guess.method,
           "null with trainer.deterministic: what is guessed decides what a seed's numbers are for",
           f"{key}.method=null, or trainer.deterministic=false")
    yield (guess.method == "ngram" and guess.prompt_lookup_min > guess.prompt_lookup_max,
           f"{key}.prompt_lookup_min", guess.prompt_lookup_min,
           f"at most prompt_lookup_max={guess.prompt_lookup_max}",
           f"{key}.prompt_lookup_min={guess.prompt_lookup_max}")


def _servers(config: Config) -> Iterator[Row]:
    """Servers that the user started: what the run does not decide, and where weights go."""
    trainer, rollout, key = config.trainer, config.actor_rollout_ref.rollout, f"{ROLLOUT}.url"
    yield (rollout.weights_dir is not None and not config.is_external, f"{ROLLOUT}.weights_dir",
           rollout.weights_dir, f"null: without {key} no server reads weights",
           f"{ROLLOUT}.weights_dir=null")
    if not config.is_external:
        return
    addresses = [str(one).rstrip("/").removesuffix("/v1") for one in config.servers]
    yield (not all(one.startswith(HTTP) for one in addresses), key, rollout.url,
           "addresses that begin with http:// or https://", f"{key}=[http://host:8000]")
    yield (len(set(addresses)) < len(addresses), key, rollout.url,
           "each server once: it is one engine", "leave the second out")
    yield (rollout.name != "vllm", f"{ROLLOUT}.name", rollout.name,
           f"vllm: the servers of {key} are vLLM's", f"{key}=null, or {ROLLOUT}.name=vllm")
    yield (trainer.nnodes > 1 and rollout.weights_dir is None, f"{ROLLOUT}.weights_dir", "null",
           "a folder that the ranks of all nodes and the servers share",
           f"{ROLLOUT}.weights_dir=/shared/weights")
    yield (trainer.deterministic, "trainer.deterministic", True,
           f"false: the servers of {key} batch requests as they like",
           "trainer.deterministic=false")
    for name, given, usual in (("trainer.rollout_gpus", trainer.rollout_gpus, 0),
                               (f"{ROLLOUT}.num_replicas", rollout.num_replicas, None),
                               (f"{ROLLOUT}.tensor_model_parallel_size",
                                rollout.tensor_model_parallel_size, 1)):  # fmt: skip
        word = "null" if usual is None else usual
        yield (given != usual, name, given,
               f"{word}: the servers of {key} have devices of their own, and are an engine each",
               f"{name}={word}")


def _critic(config: Config) -> Iterator[Row]:
    """Devices of a critic's own, where there is one."""
    critic, name, key = config.critic, config.algorithm.adv_estimator, "critic.n_gpus_per_node"
    has_own = config.has_own_critic
    yield (has_own and not ADVANTAGES[name].needs_critic, key, critic.n_gpus_per_node,
           f"null: {name} has no critic", f"{key}=null, or algorithm.adv_estimator=gae")
    yield (critic.nnodes is not None and not has_own, "critic.nnodes", critic.nnodes,
           f"null: with {key}=null the critic is where the actor is", f"{key}=1 beside it")


def _algorithm(config: Config) -> Iterator[Row]:
    """What an estimator compares, whether there is a critic, and KL in the reward."""
    name, n_agent = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n_agent
    estimator, warmup = ADVANTAGES[name], config.trainer.critic_warmup
    key, alone = f"{ROLLOUT}.n_agent", n_agent == 1 and not config.trainer.val_only
    yield (alone and estimator.needs_groups, key, n_agent,
           f"2 or more: {name} compares the samples of a prompt, one alone has advantage 0",
           f"{key}=5")
    yield (config.algorithm.filter_groups.enable and n_agent == 1, key, n_agent,
           "2 or more: algorithm.filter_groups compares the samples of a prompt", f"{key}=5")
    yield (not estimator.needs_critic and warmup, "trainer.critic_warmup", warmup,
           f"0: {name} has no critic that could warm up", "trainer.critic_warmup=0")
    key = "algorithm.kl_ctrl"
    yield (config.algorithm.kl_ctrl.type == "adaptive" and not config.kl_in_reward, f"{key}.type",
           "adaptive", "fixed: it acts on KL in the reward, of which there is none",
           f"{ACTOR}.use_kl_loss=false and {key}.kl_coef above 0, or {key}.type=fixed")
    compat = config.compat
    yield (compat.whiten_over_all_tokens and not compat.gae_over_all_tokens,
           "compat.whiten_over_all_tokens", True,
           "false, for GAE gives observation tokens no advantage to whiten",
           "set compat.gae_over_all_tokens=true beside it")


def _losses(config: Config) -> Iterator[Row]:
    """Terms of the policy loss that have something to act on."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    yield (actor.llds_coef > 0 and config.updates_per_step == 1, f"{ACTOR}.llds_coef",
           actor.llds_coef,
           "0, or several updates a step: with one, no likelihood has fallen since sampling",
           "a smaller ppo_mini_batch_size beside it")
    mask, level = actor.rollout_mask_threshold, actor.rollout_mask or actor.rollout_is
    yield (mask is not None and level == "none",
           f"{ACTOR}.rollout_mask_threshold", mask,
           "null: with rollout_is=none there is no ratio to bound",
           f"{ACTOR}.rollout_mask=token (sequence, geometric) beside it")
    for name, given in (("rollout_mask", actor.rollout_mask),
                        ("rollout_mask_floor", actor.rollout_mask_floor)):  # fmt: skip
        yield (mask is None and given is not None, f"{ACTOR}.{name}", given,
               "null: without rollout_mask_threshold nothing is left out",
               f"{ACTOR}.rollout_mask_threshold=2 beside it")
    yield (actor.rollout_is_floor > actor.rollout_is_threshold, f"{ACTOR}.rollout_is_floor",
           actor.rollout_is_floor,
           f"at most rollout_is_threshold={actor.rollout_is_threshold}",
           f"{ACTOR}.rollout_is_floor=0")
    is_engines, staleness = config.old_log_probs == "engine", rollout.max_staleness
    yield (staleness > 0 and not is_engines and actor.rollout_is == "none",
           f"{ACTOR}.old_log_probs", "recompute",
           f"a correction for tokens that are up to {staleness} weight versions old",
           f"{ACTOR}.rollout_is=token beside it, or {ACTOR}.old_log_probs=engine")
    yield (is_engines and not actor.state_masking, f"{ACTOR}.old_log_probs", "engine",
           "recompute: with state_masking=false the loss covers tokens that no engine sampled",
           f"{ACTOR}.old_log_probs=recompute")
    yield (is_engines and level != "none", f"{ACTOR}.old_log_probs", "engine",
           "recompute: the engine's own log-probs need no correction by rollout_is or rollout_mask",
           f"{ACTOR}.rollout_is=none and no rollout_mask, or {ACTOR}.old_log_probs=recompute")


def _shaping(config: Config) -> Iterator[Row]:
    """The overlong penalty rises within what the policy may sample."""
    shaping, key = config.algorithm.overlong_buffer, "algorithm.overlong_buffer"
    longest, most = config.overlong_max_length, config.max_policy_tokens
    yield (shaping.length is not None and shaping.length > longest, f"{key}.length", shaping.length,
           f"at most overlong_buffer.max_length={longest}", f"{key}.length=null")
    yield (shaping.enable and longest - config.overlong_length >= most, f"{key}.max_length",
           shaping.max_length,
           f"a penalty that begins below {most}, all tokens that the budgets let the policy sample",
           f"{key}.max_length=null")


def _server(config: Config) -> Iterator[Row]:
    """Where documents come from."""
    url, key = config.retriever.url, "retriever.url"
    is_own = url == EMPTY_URL or url.startswith(PYTHON_PREFIX)
    is_address = is_own or all(one.strip().startswith(HTTP) for one in url.split(","))
    yield (config.calls_tools and not is_address, key, repr(url),
           "http addresses with commas between them, or empty", f"{key}={ServerConfig().url}")


def reward_names(rewards: RewardConfig) -> set[str]:
    """Every reward that a run may score with."""
    sections: Sequence[RewardConfig | StageConfig] = rewards.stages or [rewards]
    return {name for section in sections for name in (section.weights or [section.name])}


def _rewards(config: Config) -> Iterator[Row]:
    """Partial scores belong to a reward of the run."""
    usual, rewards = RewardConfig(), config.reward_model
    for name, reader in READERS.items():
        key, got, default = f"reward_model.{name}", getattr(rewards, name), getattr(usual, name)
        yield (got != default and reader not in reward_names(rewards), key, got,
               f"{default}: it is a score of {reader}, which is not used here",
               f"reward_model.name={reader}, or leave {key} out")


def _stages(config: Config) -> Iterator[Row]:
    """Each stage but the last has an end, and they follow each other."""
    key, stages = "reward_model.stages", config.reward_model.stages
    test_freq = config.trainer.test_freq
    yield (stages and config.reward_model.weights, key, "stages beside reward_model.weights",
           "stages or weights; a stage may have weights of its own", "leave one of them out")
    for number, stage in enumerate(stages, 1):
        where, is_last = f"stage {number} of {key}", number == len(stages)
        has_end = stage.until_step or stage.plateau
        yield (not is_last and not has_end, where, "no end",
               "until_step or plateau: another stage follows", "until_step: 100")
        yield (is_last and has_end, where, "an end", "none: no stage follows",
               "leave until_step and plateau out")
        metric = stage.plateau.metric if stage.plateau else ""
        yield (metric.startswith("val/") and test_freq < 1, f"{where}, plateau.metric",
               f"{metric} with trainer.test_freq={test_freq}", "a metric that is taken",
               "trainer.test_freq=10")
    ends = [stage.until_step for stage in stages if stage.until_step is not None]
    yield (any(later <= earlier for earlier, later in itertools.pairwise(ends)), key,
           f"until_step {ends}", "numbers above 0 that rise", "put them in order")


def _judge(config: Config) -> Iterator[Row]:
    """A judge that can be asked, where a reward of the run is one."""
    judge, key = config.reward_model.judge, "reward_model.judge"
    if "llm_judge" not in reward_names(config.reward_model):
        return
    yield (not (judge.url or "").startswith(HTTP), f"{key}.url", judge.url,
           "the http address of an OpenAI-compatible endpoint, for llm_judge",
           f"{key}.url=http://127.0.0.1:8001/v1")
    yield (not judge.model, f"{key}.model", judge.model, "the name of a model there",
           f"{key}.model=NAME")
    lacking = [p for p in PLACEHOLDERS if judge.prompt is not None and p not in judge.prompt]
    yield (lacking, f"{key}.prompt", f"no {', '.join(lacking)}",
           f"a text with {', '.join(PLACEHOLDERS)}", "add them, or leave it null")
