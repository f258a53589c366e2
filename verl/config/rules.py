"""Rules between options, each a tuple of condition, option, got, expected and fix.

Limits of a single option are declared in its field. An option that has no effect because of another
one is refused as well, so that nobody mistakes what a run does. Unknown reward names are refused by
`search_r1.rewards`, which alone knows them, before the run starts.
"""

import itertools
from collections.abc import Iterator

from verl.config import Config, engine_kwargs
from verl.config.agent import EMPTY_URL, ServerConfig
from verl.config.data import BY_SCORE
from verl.config.policy import ActorConfig
from verl.core_algos.chosen import advantage_estimator
from verl.errors import explain
from verl.plugins import PYTHON_PREFIX

Rule = tuple[object, str, object, str, str]
"""Whether the rule is broken; then subject, got, expected and fix of the error message."""
DEFAULT_REWARDS = ("em", "em_format")
"""Values of `reward_model.name` that main_ppo and main_ppo_format have if none is given."""
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
HTTP = ("http://", "https://")


def problems(config: Config) -> Iterator[str]:
    """Yield an error message for each broken rule."""
    groups = (_lists, _budgets, _sequence_parallel, _recorded, _engines, _engine_kwargs, _servers,
              _critic, _algorithm, _order, _losses, _documents, _stages)  # fmt: skip
    for group in groups:
        for is_broken, subject, got, expected, fix in group(config):
            if is_broken:
                yield explain(subject, got, expected, fix)


# The formatter would put each string of a rule on its own line, which is harder to read.
# fmt: off
def _lists(config: Config) -> Iterator[Rule]:
    """Options that take a text or a list of texts (declared as `Any`)."""
    policy = config.actor_rollout_ref
    options = {
        "data.train_files": config.data.train_files, "data.val_files": config.data.val_files,
        "trainer.logger": config.trainer.logger,
        "actor_rollout_ref.model.target_modules": policy.model.target_modules,
        "critic.model.target_modules": config.critic.model.target_modules,
    }
    if policy.rollout.url is not None:
        options[f"{ROLLOUT}.url"] = policy.rollout.url
    for key, value in options.items():
        texts = [value] if isinstance(value, str) else value
        is_valid = isinstance(texts, list) and all(isinstance(t, str) and t for t in texts)
        is_file = key.startswith("data.")
        is_missing = not texts and (config.samples_rollouts or not is_file)
        yield (not is_valid or is_missing, key, repr(value), "a text, or a list of texts",
               f"{key}=FILE.parquet" if is_file else f"leave {key} out")


def _budgets(config: Config) -> Iterator[Rule]:
    """Token budgets and batch sizes; temperature and best metric."""
    data, trainer, rollout = config.data, config.trainer, config.actor_rollout_ref.rollout
    context, start, observation = data.max_prompt_length, data.max_start_length, data.max_obs_length
    yield (not trainer.default_local_dir.strip(), "trainer.default_local_dir",
           repr(trainer.default_local_dir), "a folder",
           "leave it out, or name a folder (. for the current one)")
    yield (start > context, "data.max_start_length",
           f"{start}, more than data.max_prompt_length={context}", "a prompt that fits the context",
           "raise data.max_prompt_length or lower data.max_start_length")
    yield (config.calls_tools and observation >= context, "data.max_obs_length",
           f"{observation}, not less than max_prompt_length={context}",
           "space for the prompt in addition to one observation",
           "raise data.max_prompt_length or lower data.max_obs_length")
    default, step = ActorConfig.ppo_mini_batch_size, config.num_trajectories
    actor_batch = config.actor_rollout_ref.actor.ppo_mini_batch_size
    critic_batch = config.critic.ppo_mini_batch_size or default
    for key, size in ((ACTOR, actor_batch), ("critic", critic_batch)):
        yield (size > step and size != default, f"{key}.ppo_mini_batch_size", size,
               f"at most the {step} trajectories of a step, or {default}, the default, for all",
               f"{key}.ppo_mini_batch_size={step}")
    yield (rollout.temperature == 0 and not trainer.val_only, f"{ROLLOUT}.temperature", 0,
           "more than 0: training needs samples that differ",
           f"{ROLLOUT}.temperature=1.0 (for validation: rollout.val_kwargs.temperature)")
    yield (not trainer.best_metric.startswith("val/"), "trainer.best_metric", trainer.best_metric,
           "a metric of validation, val/…", "trainer.best_metric=val/score")


def _sequence_parallel(config: Config) -> Iterator[Rule]:
    """Group sizes that divide the ranks, and mini-batches with a trajectory for each group."""
    actor, critic, gpus = config.actor_rollout_ref.actor, config.critic, "trainer.n_gpus_per_node"
    plan = config.placement
    models = [(ACTOR, gpus, "", plan.actor.num_ranks, plan.actor.ranks_per_shard)]
    if plan.is_apart("critic"):
        gpus, owner = "critic.n_gpus_per_node", "the critic's "
        models.append(("critic", gpus, owner, plan.critic.num_ranks, plan.critic.ranks_per_shard))
    for section, gpus, owner, ranks, size in models:
        key, num_groups = f"{ACTOR}.ulysses_sequence_parallel_size", max(1, ranks // size)
        yield (ranks % size, key, size, f"a divisor of {owner}{ranks} ranks",
               f"{key}=1, or another {gpus}")
        batch = actor.ppo_mini_batch_size
        if section == "critic":
            batch = critic.ppo_mini_batch_size or batch
        number = f"{num_groups} sequence-parallel groups of {size}" if size > 1 else num_groups
        yield (batch < num_groups and not config.trainer.val_only, f"{section}.ppo_mini_batch_size",
               batch, f"one trajectory or more for each of {owner}{number} ranks",
               f"{section}.ppo_mini_batch_size={num_groups}, or fewer {gpus}")


def _recorded(config: Config) -> Iterator[Rule]:
    """Runs that train on recorded trajectories: options of sampling have no effect there."""
    data, trainer, rollout = config.data, config.trainer, config.actor_rollout_ref.rollout
    key, is_recorded = "data.rollouts", not config.samples_rollouts
    yield (data.rescore and not is_recorded, "data.rescore", True,
           f"false: only runs with {key} use recorded scores", f"also set {key}=FOLDER")
    unused = {"trainer.val_only": trainer.val_only, "trainer.rollout_gpus": trainer.rollout_gpus,
              "trainer.rollout_data_dir": trainer.rollout_data_dir,
              f"{ROLLOUT}.replay": rollout.replay}
    for name, value in unused.items():
        yield (is_recorded and bool(value), name, value,
               f"nothing: {key} trains on recorded trajectories, without engines", "leave it out")
    yield (is_recorded and trainer.test_freq > 0, "trainer.test_freq", trainer.test_freq,
           f"0: with {key} there are no engines for validation",
           "trainer.test_freq=0; evaluate the trained model with search-r1 evaluate")


def _engines(config: Config) -> Iterator[Rule]:
    """GPUs of the engines."""
    trainer, rollout, plan = config.trainer, config.actor_rollout_ref.rollout, config.placement
    is_split = plan.is_split
    size, per_node = rollout.tensor_model_parallel_size, plan.engine_gpus_per_node
    key = "trainer.rollout_gpus"
    holder = key if is_split else "trainer.n_gpus_per_node"
    yield (per_node % size, f"{ROLLOUT}.tensor_model_parallel_size", size,
           f"a divisor of {holder}={per_node}", f"{ROLLOUT}.tensor_model_parallel_size=1")
    yield (is_split and rollout.name == "remote", key, trainer.rollout_gpus,
           f"0: {ROLLOUT}.name=remote is a server with devices of its own", f"{key}=0")


def _engine_kwargs(config: Config) -> Iterator[Rule]:
    """Arguments that go to a vLLM that the run starts, and what they change for training."""
    rollout, key = config.actor_rollout_ref.rollout, engine_kwargs.KEY
    given = engine_kwargs.given(rollout.engine_kwargs)
    starts_vllm = rollout.name == "vllm" and not config.placement.servers
    yield (given and not starts_vllm, key, ", ".join(given),
           "nothing: it is for vLLM engines that the run starts",
           "leave it out; for a server of your own, give it to vllm serve")
    is_corrected = config.reads_engine_log_probs or config.trainer.val_only
    quantized = [name for name in ("quantization", "kv_cache_dtype") if name in given]
    yield (engine_kwargs.is_approximate(given) and not is_corrected, key, ", ".join(quantized),
           "a correction as well: engine and trainer then differ by more than rounding",
           f"{ACTOR}.rollout_is=token, or {ACTOR}.old_log_probs=engine")
    for name in ("speculative_config", "enable_prefix_caching"):
        yield (name in given and config.trainer.deterministic, f"{key}.{name}", given.get(name),
               "nothing with trainer.deterministic: results would depend on other requests",
               "leave it out, or trainer.deterministic=false")


def _servers(config: Config) -> Iterator[Rule]:
    """Servers that the user started: addresses, weights, and options that the run cannot set."""
    trainer, rollout, key = config.trainer, config.actor_rollout_ref.rollout, f"{ROLLOUT}.url"
    servers, settings = config.placement.servers, ("weights_dir", "served_model", "api_key_env")
    for name, value in rollout.server.items():
        yield (name not in settings or not isinstance(value, str | None),
               f"{ROLLOUT}.server.{name}", repr(value), f"a text named {' or '.join(settings)}",
               "correct it, or leave it out")
    yield (rollout.weights_dir is not None and not servers, f"{ROLLOUT}.weights_dir",
           rollout.weights_dir, f"null: without {key} no server loads weights",
           f"{ROLLOUT}.weights_dir=null")
    if not servers:
        return
    addresses = [str(url).rstrip("/").removesuffix("/v1") for url in servers]
    yield (not all(url.startswith(HTTP) for url in addresses), key, rollout.url,
           "addresses that begin with http:// or https://", f"{key}=[http://host:8000]")
    yield (len(set(addresses)) < len(addresses), key, rollout.url,
           "each server only once: it is one engine", "leave the duplicate out")
    yield (rollout.name != "vllm", f"{ROLLOUT}.name", rollout.name,
           f"vllm: the servers of {key} are vLLM's", f"{key}=null, or {ROLLOUT}.name=vllm")
    yield (trainer.nnodes > 1 and rollout.weights_dir is None, f"{ROLLOUT}.weights_dir", "null",
           "a folder that the ranks of all nodes and the servers share",
           f"{ROLLOUT}.weights_dir=/shared/weights")
    yield (trainer.deterministic, "trainer.deterministic", True,
           f"false: the servers of {key} batch requests in their own way",
           "trainer.deterministic=false")
    for name, value, default in (("trainer.rollout_gpus", trainer.rollout_gpus, 0),
                                 (f"{ROLLOUT}.num_replicas", rollout.num_replicas, None),
                                 (f"{ROLLOUT}.tensor_model_parallel_size",
                                  rollout.tensor_model_parallel_size, 1)):  # fmt: skip
        default_text = "null" if default is None else default
        yield (value != default, name, value,
               f"{default_text}: each server of {key} is one engine with devices of its own",
               f"{name}={default_text}")


def _critic(config: Config) -> Iterator[Rule]:
    """Devices of a critic that does not share the actor's."""
    critic, name, key = config.critic, config.algorithm.adv_estimator, "critic.n_gpus_per_node"
    has_own = config.placement.is_apart("critic")
    yield (has_own and not advantage_estimator(name).needs_critic, key, critic.n_gpus_per_node,
           f"null: {name} has no critic", f"{key}=null, or algorithm.adv_estimator=gae")


def _algorithm(config: Config) -> Iterator[Rule]:
    """Needs of the advantage estimator, the critic's warm-up, and KL in the reward."""
    name, n_agent = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n_agent
    estimator, warmup = advantage_estimator(name), config.trainer.critic_warmup
    key, is_single = f"{ROLLOUT}.n_agent", n_agent == 1 and not config.trainer.val_only
    yield (is_single and estimator.needs_groups, key, n_agent,
           f"2 or more: {name} compares the samples of a prompt, a single one has advantage 0",
           f"{key}=5")
    yield (config.algorithm.filter_groups.enable and n_agent == 1, key, n_agent,
           "2 or more: algorithm.filter_groups compares the samples of a prompt", f"{key}=5")
    yield (not estimator.needs_critic and warmup, "trainer.critic_warmup", warmup,
           f"0: {name} has no critic to warm up", "trainer.critic_warmup=0")
    key = "algorithm.kl_ctrl"
    yield (config.algorithm.kl_ctrl.type == "adaptive" and not config.kl_in_reward, f"{key}.type",
           "adaptive", "fixed: it controls the KL in the reward, and there is none",
           f"{ACTOR}.use_kl_loss=false and {key}.kl_coef above 0, or {key}.type=fixed")


def _order(config: Config) -> Iterator[Rule]:
    """Rows drawn by past scores need groups, and no other draw."""
    data, n_agent = config.data, config.actor_rollout_ref.rollout.n_agent
    key, is_by_score = "data.shuffle_train_dataloader", data.shuffle_train_dataloader == BY_SCORE
    yield (is_by_score and n_agent == 1 and not config.trainer.val_only, f"{ROLLOUT}.n_agent", 1,
           f"2 or more: {key}={BY_SCORE} compares the samples of a prompt", f"{ROLLOUT}.n_agent=5")
    yield (is_by_score and data.weight_column is not None, key, BY_SCORE,
           "one order of the rows: data.weight_column draws them too", f"{key}=true")


def _losses(config: Config) -> Iterator[Rule]:
    """Terms and corrections of the policy loss that would have no effect, or are missing."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    yield (actor.llds_coef > 0 and config.updates_per_step == 1, f"{ACTOR}.terms.llds",
           actor.llds_coef,
           "0, or several updates a step: with one, no likelihood has dropped since sampling",
           "also set a smaller ppo_mini_batch_size")
    needs_group = actor.terms.get("sibling", 0) > 0 and rollout.n_agent == 1
    yield (needs_group and not config.trainer.val_only, f"{ROLLOUT}.n_agent", 1,
           f"2 or more: {ACTOR}.terms.sibling learns from another sample of the prompt",
           f"{ROLLOUT}.n_agent=5")
    yield (bool(actor.terms.get("teacher")) and rollout.temperature != 1.0,
           f"{ROLLOUT}.temperature", rollout.temperature,
           f"1.0: the log-probs of {ACTOR}.terms.teacher are at that temperature",
           f"{ROLLOUT}.temperature=1.0")
    chosen = actor.correction
    mask, level = chosen.rollout_mask_threshold, chosen.rollout_mask or chosen.rollout_is
    yield (mask is not None and level == "none",
           f"{ACTOR}.rollout_mask_threshold", mask,
           "null: with rollout_is=none there is no ratio to bound",
           f"also set {ACTOR}.rollout_mask=token (or sequence, geometric)")
    for name, value in (("rollout_mask", chosen.rollout_mask),
                        ("rollout_mask_floor", chosen.rollout_mask_floor)):  # fmt: skip
        yield (mask is None and value is not None, f"{ACTOR}.{name}", value,
               "null: without rollout_mask_threshold nothing is masked out",
               f"also set {ACTOR}.rollout_mask_threshold=2")
    levels = {chosen.rollout_is, level if mask is not None else "none"}
    yield (rollout.top_p < 1 and bool(levels & {"sequence", "geometric"}), f"{ROLLOUT}.top_p",
           rollout.top_p, "1.0: the engine's log-probs are of the truncated distribution, and a "
           "correction by trajectory would leave everything out", f"{ROLLOUT}.top_p=1.0")
    is_engine, staleness = config.old_log_probs == "engine", rollout.max_staleness
    yield (staleness > 0 and not is_engine and chosen.rollout_is == "none",
           f"{ACTOR}.old_log_probs", "recompute",
           f"a correction for tokens that are up to {staleness} weight versions old",
           f"also set {ACTOR}.rollout_is=token, or {ACTOR}.old_log_probs=engine")
    yield (is_engine and not actor.state_masking, f"{ACTOR}.old_log_probs", "engine",
           "recompute: with state_masking=false the loss covers tokens that no engine sampled",
           f"{ACTOR}.old_log_probs=recompute")
    yield (is_engine and level != "none", f"{ACTOR}.old_log_probs", "engine",
           "recompute: the engine's log-probs need no correction by rollout_is or rollout_mask",
           f"{ACTOR}.rollout_is=none and no rollout_mask, or {ACTOR}.old_log_probs=recompute")


def _documents(config: Config) -> Iterator[Rule]:
    """Addresses of the document server."""
    url, key = config.retriever.url, "retriever.url"
    is_address = all(address.strip().startswith(HTTP) for address in url.split(","))
    is_valid = is_address or url == EMPTY_URL or url.startswith(PYTHON_PREFIX)
    yield (config.calls_tools and not is_valid, key, repr(url),
           "http addresses separated by commas, or empty", f"{key}={ServerConfig().url}")


def _stages(config: Config) -> Iterator[Rule]:
    """Every stage but the last must have an end, and the ends must rise."""
    key, stages = "reward_model.stages", config.reward_model.stages
    test_freq, name = config.trainer.test_freq, config.reward_model.name
    is_other = bool(stages or config.reward_model.weights) and name not in DEFAULT_REWARDS
    yield (is_other, "reward_model.name", name,
           f"em, the default: {key} and reward_model.weights name the rewards of a run",
           "leave it out, or add reward_model.weights={} reward_model.stages=[]")
    yield (stages and config.reward_model.weights, key, "stages and reward_model.weights",
           "stages or weights; each stage may have its own weights", "leave one of them out")
    for number, stage in enumerate(stages, 1):
        subject, is_last = f"stage {number} of {key}", number == len(stages)
        has_end = stage.until_step or stage.plateau
        yield (not is_last and not has_end, subject, "no end",
               "until_step or plateau: another stage follows", "until_step: 100")
        yield (is_last and has_end, subject, "an end", "no end: no stage follows",
               "leave until_step and plateau out")
        metric = stage.plateau.metric if stage.plateau else ""
        yield (metric.startswith("val/") and test_freq < 1, f"{subject}, plateau.metric",
               f"{metric} with trainer.test_freq={test_freq}", "a metric that the run computes",
               "trainer.test_freq=10")
    ends = [stage.until_step for stage in stages if stage.until_step is not None]
    yield (any(later <= earlier for earlier, later in itertools.pairwise(ends)), key,
           f"until_step {ends}", "rising numbers above 0", "put them in order")
    trainer, best = config.trainer, config.trainer.best_metric
    ranks = trainer.keep_last is not None and trainer.keep_best > 0 and test_freq > 0
    yield (len(stages) > 1 and ranks and best.endswith("/score"), "trainer.best_metric", best,
           "a metric that all stages share: a stage's score does not rank checkpoints of another",
           "trainer.best_metric=val/em, or trainer.keep_best=0")
