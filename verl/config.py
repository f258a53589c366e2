"""Every option of a training run: one dataclass a section, one home for each default.

Hydra composes these (see `verl/trainer/options/cli.py`), `check` refuses settings that cannot work
before anything starts. Nothing here starts work, and nobody mutates a config after start. Option
names are those of the original Search-R1 scripts; an option that lost its effect says so in its
docstring and is listed in `verl/trainer/options/cli.py`, which warns about it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class DataConfig:
    """Questions and token budgets."""

    train_files: Any = MISSING
    """Parquet or jsonl file of training rows, or a list of them."""
    val_files: Any = MISSING
    """Parquet or jsonl file of validation rows, or a list of them."""
    train_data_num: int | None = None
    """Use only this many training rows, chosen by seed; null for all."""
    val_data_num: int | None = None
    """Use only this many validation rows, chosen by seed; null for all."""
    train_batch_size: int = 512
    """Prompts per training step, before sampling `n_agent` trajectories of each."""
    val_batch_size: int = 256
    """Prompts per validation request; every row is scored whatever this is."""
    max_prompt_length: int = 4096
    """Tokens the engine may be given at any turn: prompt, earlier turns and observations."""
    max_response_length: int = 500
    """Tokens the policy may sample in one turn."""
    max_start_length: int = 2048
    """Tokens of the initial prompt; longer rows are filtered before training, with the count."""
    max_obs_length: int = 500
    """Tokens of one observation, wrapping included."""
    shuffle_train_dataloader: bool = True
    """Shuffle training rows every epoch, by `trainer.seed`."""
    prompt_key: str = "prompt"
    """Column that holds the chat messages (or a plain string for base models)."""
    filter_overlong_prompts: bool = True
    """Drop over-long rows with a count; false refuses them with their numbers."""

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest trajectory: the last context and one more response."""
        return self.max_prompt_length + self.max_response_length


@dataclass
class OptimConfig:
    """AdamW and its schedule (linear warm-up, then constant)."""

    lr: float = 1e-6
    """Peak learning rate."""
    lr_warmup_steps_ratio: float = 0.0
    """Share of all optimizer steps over which lr rises linearly from 0."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moment decays."""


@dataclass
class FsdpConfig:
    """What leaves the device between uses; without effect on CPU."""

    param_offload: bool = False
    """Keep parameters, gradients and optimizer state on the host (FSDP2's CPU offload)."""
    grad_offload: bool = False
    """No effect any more: gradients go with `param_offload`."""
    optimizer_offload: bool = False
    """Move optimizer state to the host between updates."""


@dataclass
class ModelConfig:
    """The policy's weights, and how its forward runs."""

    path: str = MISSING
    """Folder (or hub name) of a Hugging Face causal language model."""
    enable_gradient_checkpointing: bool = True
    """Recompute block activations in backward: less memory, about a third more compute."""
    use_remove_padding: bool = True
    """No effect any more: batches are never padded."""


@dataclass
class ActorConfig:
    """The policy update."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    ppo_mini_batch_size: int = 256
    """Trajectories per optimizer step, over all ranks."""
    ppo_micro_batch_size: int | None = None
    """Full-length trajectories per forward over all ranks; sets the token budget when
    `ppo_max_token_len_per_gpu` is null."""
    ppo_max_token_len_per_gpu: int | None = None
    """Token budget of one packed forward on one rank; null derives it, or takes 16,384."""
    ppo_epochs: int = 1
    """Passes over a step's trajectories."""
    grad_clip: float = 1.0
    """Gradient norm bound."""
    clip_ratio: float = 0.2
    """PPO's epsilon below 1, and above it unless `clip_ratio_high` is set."""
    clip_ratio_high: float | None = None
    """Epsilon above 1 (clip-higher); null takes `clip_ratio`."""
    clip_ratio_c: float = 3.0
    """Dual-clip bound for negative advantages."""
    policy_loss: str = "ppo"
    """ppo (clip, dual clip), gspo (ratio of the sequence), cispo (clipped weight) or gpg (none)."""
    loss_agg_mode: str = "token-mean"
    """How token losses become one: token-mean, seq-mean-token-sum, seq-mean-token-mean,
    seq-mean-token-sum-norm."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add KL to the reference policy to the loss (needs the reference)."""
    kl_loss_coef: float = 0.001
    """Weight of that KL."""
    kl_loss_type: str = "low_var_kl"
    """Estimator: kl, abs, mse, low_var_kl."""
    llds_coef: float = 0.0
    """Weight of the penalty on likelihood that good trajectories lose (LLDS; 0.1 is published)."""
    llds_gate: str = "turn"
    """What must have lost likelihood for its tokens to count: turn or trajectory."""
    rollout_is: str = "none"
    """Weigh losses by trainer against engine probability: none, token, sequence (product)."""
    rollout_is_threshold: float = 2.0
    """Cut of that weight."""
    rollout_mask_threshold: float | None = None
    """Leave out tokens (sequences) whose ratio is above this, or below its inverse; null: none."""
    skip_zero_advantages: bool = True
    """Spare the forward of trajectories whose advantages are all 0 (a group of equal scores): they
    have no gradient. Without effect when KL or entropy is in the loss."""
    state_masking: bool = True
    """Leave observation tokens out of the loss; false trains on documents too (ablation)."""


@dataclass
class ValSamplingConfig:
    """How validation samples; greedy unless said otherwise."""

    temperature: float = 0.0
    top_p: float = 1.0


@dataclass
class RolloutConfig:
    """Generation by vLLM."""

    name: str = "vllm"
    """The engine; vllm is the only one."""
    n_agent: int = 1
    """Trajectories sampled per prompt (the group size of GRPO)."""
    temperature: float = 1.0
    """Sampling temperature of training rollouts."""
    top_p: float = 1.0
    """Nucleus bound of training rollouts; below 1, engine and trainer log-probs differ."""
    gpu_memory_utilization: float = 0.6
    """Share of a GPU's memory that vLLM may take."""
    cpu_kv_cache_gib: int = 2
    """KV cache of one engine on CPU, in GiB."""
    tensor_model_parallel_size: int = 1
    """GPUs per engine."""
    num_replicas: int | None = None
    """Engines; null for as many as the GPUs hold (one on CPU)."""
    dtype: str = "auto"
    """auto (bfloat16 where the trainer computes in it), bfloat16, float32."""
    max_num_seqs: int = 256
    """Trajectories decoded at once by one engine."""
    enforce_eager: bool | None = None
    """Skip graph capture and compilation; null means true on CPU and false on GPU."""
    log_prob_micro_batch_size: int | None = None
    """No effect any more: log-prob passes use `log_prob_max_token_len_per_gpu`."""
    log_prob_max_token_len_per_gpu: int | None = None
    """Token budget of a forward without gradient; null for twice the actor's."""
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)


@dataclass
class RefConfig:
    """The frozen reference policy."""

    log_prob_micro_batch_size: int | None = None
    """No effect any more: see rollout.log_prob_max_token_len_per_gpu."""
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)


@dataclass
class ActorRolloutRefConfig:
    """Policy: its weights, update, generation and reference."""

    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    ref: RefConfig = field(default_factory=RefConfig)


@dataclass
class CriticModelConfig:
    """The critic's weights."""

    path: str | None = None
    """Folder of the model whose trunk the critic starts from; null for the policy's."""
    enable_gradient_checkpointing: bool = True
    use_remove_padding: bool = True
    """No effect any more: batches are never padded."""
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)


@dataclass
class CriticConfig:
    """The value function; used by adv_estimator=gae only."""

    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    ppo_micro_batch_size: int | None = None
    """As the actor's."""
    ppo_max_token_len_per_gpu: int | None = None
    """As the actor's; null for twice the actor's."""
    ppo_mini_batch_size: int | None = None
    """Trajectories per critic step; null for the actor's."""
    ppo_epochs: int = 1
    """Passes over a step's trajectories."""
    grad_clip: float = 1.0
    cliprange_value: float = 0.5
    """How far a value may move from the old one before its loss is clipped."""


@dataclass
class KlControlConfig:
    """KL in the reward."""

    type: str = "fixed"
    """fixed or adaptive."""
    kl_coef: float = 0.001
    """Weight (the starting one, if adaptive); used when KL is not in the loss."""
    target_kl: float = 0.1
    """Adaptive: the KL in nats, a mean over policy tokens and then sequences, that is aimed at."""
    horizon: int = 10000
    """Adaptive: how many trajectories the correction takes."""


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling: train on groups whose members do not all score the same."""

    enable: bool = False
    """Replace groups of equal scores by those of further prompts."""
    max_num_gen_batches: int = 10
    """Batches of prompts that a step may sample before it takes what it has."""


@dataclass
class AlgorithmConfig:
    """From scores to advantages."""

    adv_estimator: str = "gae"
    """gae (PPO), grpo, dr_grpo, rloo, opo, reinforce, reinforce_baseline, reinforce_plus_plus,
    reinforce_plus_plus_baseline or remax (one more, greedy, rollout a prompt)."""
    gamma: float = 1.0
    """Discount per policy token."""
    lam: float = 1.0
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide grpo's advantages by the group's standard deviation; dr_grpo never does."""
    kl_penalty: str = "kl"
    """Estimator of KL in the reward: kl, abs, mse, low_var_kl."""
    kl_ctrl: KlControlConfig = field(default_factory=KlControlConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    no_think_rl: bool = False
    """Train without a thinking part: `<think>` is closed at once in the prompt."""


@dataclass
class TrainerConfig:
    """The run: where, how long, how often."""

    project_name: str = "Search-R1"
    experiment_name: str = "default"
    logger: Any = field(default_factory=lambda: ["console", "jsonl"])
    """Any of console, jsonl, wandb, tensorboard; a name or a list."""
    default_local_dir: str = "runs/${trainer.project_name}/${trainer.experiment_name}"
    """Where checkpoints, metrics and the resolved config go."""
    default_hdfs_dir: str | None = None
    """No effect any more: copy `default_local_dir` instead."""
    device: str = "auto"
    """auto (cuda where there is one), cuda, cpu."""
    compute_dtype: str = "auto"
    """Forward and backward: auto (bfloat16 where the device has units for it), bfloat16,
    float32. Master weights are float32 always."""
    n_gpus_per_node: int = 8
    """Training ranks per node (on CPU: processes)."""
    nnodes: int = 1
    """Nodes of the Ray cluster."""
    total_epochs: int = 15
    """Passes over the training rows, if `total_training_steps` is null."""
    total_training_steps: int | None = None
    """Updates of the run."""
    critic_warmup: int = 0
    """Steps in which only the critic learns."""
    save_freq: int = -1
    """Steps between checkpoints; -1 saves at the end only, 0 never."""
    test_freq: int = -1
    """Steps between validations; -1 validates at start and end only, 0 never after start."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate, then stop."""
    resume_mode: str = "disable"
    """disable, auto (latest complete checkpoint, if any), or the path of one."""
    seed: int = 0
    """Seed of data order, sampling and initialisation of the value head."""


@dataclass
class RewardConfig:
    """The rule that scores a trajectory."""

    name: str = "em"
    """A row of `search_r1.reward.REWARDS`, or your own `path/to/file.py:function`."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weights of several rewards by name (`{em: 1.0, f1: 0.5}`), in place of `name`."""
    format_score: float = 0.0
    """em: score of a wrong but well-formed answer."""
    structure_format_score: float = 0.0
    """em_format: score of a valid dialogue structure."""
    final_format_score: float = 0.0
    """em_format: score of a present answer in an invalid structure."""
    retrieval_score: float = 0.0
    """em_format: extra score when a retrieved document holds the answer."""
    correct_answer: float = 1.0
    """em_cost: score of a correct answer."""
    search_penalty: float = 0.0
    """em_cost: what each search costs."""
    invalid_format: float = 0.0
    """em_cost: what each turn without an action costs."""
    penalise_correct_only: bool = False
    """em_cost: take costs off correct answers alone."""


@dataclass
class RetrieverConfig:
    """The search server that the agent asks."""

    url: str = "http://127.0.0.1:8000/retrieve"
    """Address of `/retrieve`, or several with commas between them that stand in for each other;
    `empty` for no documents at all (a control)."""
    topk: int = 3
    """Documents per query."""
    timeout: float = 60.0
    """Seconds one request may take."""
    max_retries: int = 8
    """Further tries after a failed request, at another address or with growing pauses."""
    deadline: float | None = None
    """Seconds one search may take with all its tries; null: as long as they last."""


@dataclass
class Config:
    """A training run."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    reward_model: RewardConfig = field(default_factory=RewardConfig)
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    max_turns: int = 2
    """Searches a trajectory may make; a last turn without search follows."""
    do_search: bool = True
    """False runs without a retriever: a search is then an invalid action."""
    template: str = "search_r1"
    """Prompt and observation wording, a row of `search_r1.llm_agent.tags.TEMPLATES`."""

    @property
    def kl_in_reward(self) -> bool:
        """KL to the reference is taken off the reward: it has weight and is not in the loss."""
        return not self.actor_rollout_ref.actor.use_kl_loss and self.algorithm.kl_ctrl.kl_coef > 0

    @property
    def kl_in_loss(self) -> bool:
        """KL to the reference is a term of the policy loss."""
        actor = self.actor_rollout_ref.actor
        return actor.use_kl_loss and actor.kl_loss_coef > 0

    @property
    def needs_reference(self) -> bool:
        """A frozen reference policy must be held."""
        return self.kl_in_reward or self.kl_in_loss

    @property
    def needs_every_trajectory(self) -> bool:
        """The policy's loss has terms besides the advantage's, so no trajectory can be spared."""
        actor = self.actor_rollout_ref.actor
        has_terms = self.kl_in_loss or actor.entropy_coeff != 0 or actor.llds_coef > 0
        return has_terms or not actor.skip_zero_advantages

    @property
    def num_ranks(self) -> int:
        """Training ranks over all nodes."""
        return self.trainer.n_gpus_per_node * self.trainer.nnodes

    @property
    def num_trajectories(self) -> int:
        """Trajectories of one training step."""
        return self.data.train_batch_size * self.actor_rollout_ref.rollout.n_agent

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of the actor in one training step."""
        actor = self.actor_rollout_ref.actor
        return -(-self.num_trajectories // actor.ppo_mini_batch_size) * actor.ppo_epochs
