"""The policy: its weights, update, generation and reference."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from verl.config.lora import AdapterConfig
from verl.config.optim import FsdpConfig, OptimConfig


@dataclass
class ModelConfig(AdapterConfig):
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
    """Dual-clip bound for negative advantages (policy_loss=ppo)."""
    policy_loss: str = "ppo"
    """ppo (clip, dual clip), gspo (ratio of the sequence), cispo (clipped weight) or gpg (none)."""
    loss_agg_mode: str = "token-mean"
    """How token losses become one: token-mean, seq-mean-token-sum, seq-mean-token-mean,
    seq-mean-token-sum-norm (divided by the tokens that a whole trajectory may sample)."""
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
    """Sampling temperature of validation; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus bound of validation."""


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
    """auto (what the trainer computes in), bfloat16, float16, float32."""
    max_num_seqs: int | None = None
    """Trajectories decoded at once by one engine; null for its part of a step or of a validation
    request, whichever is more, up to 512 (256 on CPU)."""
    merge_adapter: bool | None = None
    """Give the engine the policy with its adapter merged, not the adapter; null means true on CPU,
    where vLLM computes an adapter more slowly than the model below it, and false on GPU."""
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
