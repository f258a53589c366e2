"""The policy, its weights, update, generation and reference; and the critic, its value function."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from verl.config.option import option

ALL_LINEAR = "all-linear"
SELECTIVE = "selective"
RECOMPUTED = (True, False, SELECTIVE)
"""What of a block's activations is recomputed: all, nothing, or what is cheap."""
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM can reserve room for; an adapter takes the next larger."""


@dataclass
class AdapterConfig:
    """A LoRA adapter: each chosen matrix W acts as W + lora_alpha / lora_rank · B A."""

    lora_rank: int = option(0, resume="fixed", ge=0, le=512)
    """Rank of A and B; 0 trains all weights and has no adapter."""
    lora_alpha: float = option(16.0, resume="fixed", gt=0)
    """Numerator of the adapter's scale; twice the rank is usual."""
    target_modules: Any = option(ALL_LINEAR, resume="fixed")
    """all-linear (every linear layer but the output head), or a list such as [q_proj,v_proj]."""

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained, and the weights below it stay as they are."""
        return self.lora_rank > 0


@dataclass
class OptimConfig:
    """AdamW and its schedule (linear warm-up, then constant)."""

    lr: float = option(1e-6, resume="logged", gt=0, le=1)
    """Peak learning rate."""
    lr_warmup_steps_ratio: float = option(0.0, resume="logged", ge=0, le=1)
    """Share of all optimizer steps over which lr rises linearly from 0."""
    weight_decay: float = option(0.01, resume="logged", ge=0, le=10)
    """Decoupled weight decay."""
    betas: tuple[float, float] = option((0.9, 0.999), resume="experiment", ge=0, lt=1)
    """AdamW's moment decays."""


@dataclass
class FsdpConfig:
    """What leaves the device between uses: of offloading, without effect on CPU.

    What is null is chosen before the run starts: on, where the memory estimate says that the device
    has not the room (`verl.preflight.memory.check`), and where nothing can be estimated.
    """

    param_offload: bool | None = option(None, resume="free")
    """Keep parameters, gradients and optimizer state on the host (FSDP2's CPU offload), which costs
    seconds a step; null where the device has not the room for them."""
    optimizer_offload: bool | None = option(None, resume="free")
    """Move optimizer state to the host between updates; null where the device has not the room."""
    reshard_each: bool | None = option(True, resume="free")
    """Spread weights and gradients over the ranks again in each micro-batch of an update. false
    keeps both whole until its last one, which spares their collectives; null does so where the
    memory estimate says that GPUs have the room."""


@dataclass
class BlocksConfig(AdapterConfig):
    """A model that learns, and how its blocks compute."""

    enable_gradient_checkpointing: bool | str | None = option(
        True, resume="free", choices=RECOMPUTED
    )
    """Recompute block activations in backward: less memory, about a third more compute. selective
    keeps the results of matrix products and of attention, half of all, and recomputes the rest,
    which costs little (with kernels=torch alone). null takes false, else selective, where the
    memory estimate says that GPUs have the room, else true."""
    kernels: str = option("torch", resume="logged", choices=("torch", "compile", "liger"))
    """What blocks compute norms, rotation and activation with: torch, compile (torch.compile, with
    some seconds of compiling at first: `actor/compile_s`) or liger (the package liger-kernel, on
    GPUs). Results differ by rounding."""


@dataclass
class ModelConfig(BlocksConfig):
    """The policy's weights, and how its forward runs."""

    path: str = option(MISSING, resume="free")
    """Folder (or hub name) of a Hugging Face causal language model."""
    trust_remote_code: bool = option(False, resume="free")
    """Run the code that the models' folders bring, as some need: whoever wrote it acts as you."""


@dataclass
class ActorConfig:
    """The policy update."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    ppo_mini_batch_size: int = option(256, resume="experiment", ge=1)
    """Trajectories per optimizer step, over all ranks; the default takes all of a smaller step."""
    ppo_micro_batch_size: int | None = option(None, resume="free", ge=1)
    """Full-length trajectories per forward over all ranks; sets the token budget when
    `ppo_max_token_len_per_gpu` is null."""
    ppo_max_token_len_per_gpu: int | None = option(None, resume="free", ge=1)
    """Token budget of one packed forward on one rank; null derives it, or takes 16,384. Ranks that
    compute together have as many times that."""
    ulysses_sequence_parallel_size: int = option(1, resume="free", ge=1)
    """Ranks that compute each dialogue together, the reference's log-probs too, so that its
    activations are divided among them (docs/memory.md). It divides the number of ranks and that of
    the model's attention heads."""
    ppo_epochs: int = option(1, resume="experiment", ge=1, le=1000)
    """Passes over a step's trajectories."""
    grad_clip: float = option(1.0, resume="logged", gt=0)
    """Gradient norm bound."""
    clip_ratio: float = option(0.2, resume="logged", gt=0, le=1000)
    """PPO's epsilon below 1, and above it unless `clip_ratio_high` is set."""
    clip_ratio_high: float | None = option(None, resume="logged", gt=0, le=1000)
    """Epsilon above 1 (clip-higher); null takes `clip_ratio`."""
    clip_ratio_c: float = option(3.0, resume="logged", gt=1)
    """Dual-clip bound for negative advantages (policy_loss=ppo)."""
    policy_loss: str = option(
        "ppo", resume="experiment", choices="verl.core_algos.policy_losses:POLICY_LOSSES"
    )
    """ppo (clip, dual clip), gspo (ratio of the sequence), cispo (clipped weight) or gpg (none)."""
    loss_agg_mode: str = option(
        "token-mean", resume="logged", choices="verl.core_algos.losses:AGGREGATIONS"
    )
    """How token losses become one: token-mean, seq-mean-token-sum, seq-mean-token-mean,
    seq-mean-token-sum-norm (divided by the tokens that a whole trajectory may sample)."""
    entropy_coeff: float = option(0.0, resume="logged", ge=-10, le=10)
    """Weight of the entropy bonus."""
    use_kl_loss: bool = option(False, resume="logged")
    """Add KL to the reference policy to the loss (needs the reference)."""
    kl_loss_coef: float = option(0.001, resume="logged", ge=0, le=1000)
    """Weight of that KL."""
    kl_loss_type: str = option("low_var_kl", resume="logged", choices="verl.core_algos.kl:KL_KINDS")
    """Estimator: kl, abs, mse, low_var_kl."""
    llds_coef: float = option(0.0, resume="logged", ge=0, le=1000)
    """Weight of the penalty on likelihood that good trajectories lose (LLDS; 0.1 is published)."""
    llds_gate: str = option("turn", resume="logged", choices=("turn", "trajectory"))
    """What must have lost likelihood for its tokens to count: turn or trajectory."""
    old_log_probs: str | None = option(None, resume="logged", choices=("recompute", "engine"))
    """What the ratio of the loss compares with: recompute (the trainer's log-probs before the
    step's updates; a pass of its own where a step has several) or engine (those of sampling); null
    is engine where rollout.max_staleness is above 0, and else recompute."""
    rollout_is: str = option("none", resume="logged", choices="verl.core_algos.mismatch:LEVELS")
    """Weigh losses by trainer against engine probability: none, token, sequence (product),
    geometric (the product's root by the number of tokens)."""
    rollout_is_threshold: float = option(2.0, resume="logged", gt=0)
    """Largest weight; more is cut to it."""
    rollout_is_floor: float = option(0.0, resume="logged", ge=0)
    """Smallest weight; less is raised to it, and 0 changes nothing."""
    rollout_mask: str | None = option(
        None, resume="logged", choices=("token", "sequence", "geometric")
    )
    """Level of the ratio that decides what is left out; null takes that of `rollout_is`."""
    rollout_mask_threshold: float | None = option(None, resume="logged", gt=1)
    """Leave out tokens (sequences) whose ratio is above this, or below `rollout_mask_floor`; null:
    none."""
    rollout_mask_floor: float | None = option(None, resume="logged", ge=0, le=1)
    """Least ratio that is not left out; null is the inverse of `rollout_mask_threshold`."""
    skip_zero_advantages: bool = option(True, resume="logged")
    """Skip the forward of trajectories whose advantages are all 0 (a group of equal scores): they
    have no gradient. Without effect when KL or entropy is in the loss."""
    state_masking: bool = option(True, resume="experiment")
    """Leave observation tokens out of the loss; false trains on documents too (ablation)."""


@dataclass
class ValSamplingConfig:
    """How validation samples; greedy unless said otherwise."""

    temperature: float = option(0.0, resume="logged", ge=0, le=10)
    """Sampling temperature of validation; 0 is greedy."""
    top_p: float = option(1.0, resume="logged", gt=0, le=1)
    """Nucleus bound of validation."""


@dataclass
class SpeculativeConfig:
    """Tokens that vLLM guesses from text that is there already, and verifies several of at once:
    what is sampled has the distribution that it has without."""

    method: str | None = option(None, resume="logged", choices=("ngram", "suffix"))
    """ngram (whatever followed the last tokens earlier in the dialogue), suffix (whatever mostly
    followed them in the dialogue and in earlier answers; needs arctic-inference); null: none."""
    num_speculative_tokens: int = option(5, resume="logged", ge=1, le=32)
    """Most tokens that are guessed at once."""
    prompt_lookup_min: int = option(3, resume="logged", ge=1, le=32)
    """Least tokens that must have stood there before (ngram)."""
    prompt_lookup_max: int = option(5, resume="logged", ge=1, le=32)
    """Most tokens that are looked for (ngram)."""


@dataclass
class RolloutConfig:
    """Generation of trajectories."""

    name: str = option("vllm", resume="logged")
    """The engine: vllm, transformers (small models, one request at a time), remote (a server that
    takes no new weights: not for training), or path/file.py:Name (docs/rollout_engines.md)."""
    url: Any = option(None, resume="free")
    """Addresses of vLLM servers that you started: each is an engine, and reads each new version of
    the weights (docs/placement.md). With name=remote, the address of any OpenAI-compatible server.
    """
    weights_dir: str | None = option(None, resume="free")
    """Folder that ranks write new weights into, and the servers of `url` read them from, by the
    same path; null is this machine's shared memory, for servers on it."""
    weight_sync: str = option("files", resume="free", choices=("files", "ipc", "nccl"))
    """How new weights come to engines: files in shared memory; ipc, through the memory of the
    device that ranks and engines share; nccl (gloo on a CPU), to engines on devices of their own
    (trainer.rollout_gpus)."""
    weight_delta: bool = option(False, resume="free")
    """With nccl, send after the first time only the values that changed in the engines' dtype; the
    first rank and each engine's worker keep a copy of the weights in host memory for that."""
    served_model: str | None = option(None, resume="free")
    """The model's name there; null takes whichever it is, with name=remote the model's path."""
    api_key_env: str | None = option(None, resume="free")
    """Variable that holds its key; null sends OPENAI_API_KEY to https://api.openai.com alone."""
    n_agent: int = option(1, resume="experiment", ge=1)
    """Trajectories sampled per prompt (the group size of GRPO)."""
    temperature: float = option(1.0, resume="logged", ge=0, le=10)
    """Sampling temperature of training rollouts."""
    top_p: float = option(1.0, resume="logged", gt=0, le=1)
    """Nucleus bound of training rollouts; below 1, engine and trainer log-probs differ."""
    gpu_memory_utilization: float = option(0.6, resume="free", gt=0, le=1)
    """Share of a GPU's memory that vLLM may take; 0.9 is usual on one of its own
    (trainer.rollout_gpus)."""
    cpu_kv_cache_gib: int = option(2, resume="free", ge=1)
    """KV cache of one engine on CPU, in GiB."""
    tensor_model_parallel_size: int = option(1, resume="free", ge=1)
    """GPUs per engine."""
    num_replicas: int | None = option(None, resume="free", ge=1)
    """Engines; null for as many as the GPUs hold (one on CPU)."""
    max_staleness: int = option(0, resume="logged", ge=0, le=64)
    """By how many weight versions a token may be older than those it trains; 0 samples and trains
    in turns, more samples that many steps ahead (docs/asynchrony.md)."""
    replay: str | None = option(None, resume="free")
    """Folder `schedule` of another run: the weights that sampled a turn there sample it here."""
    partial: bool = option(True, resume="logged")
    """Let a trajectory go on with newer weights at its next turn; false keeps it to one version."""
    interrupt_turns: bool = option(False, resume="logged")
    """Have engines take new weights at once: turns that are being sampled end where they are and
    are continued by them; false lets turns end first."""
    dtype: str = option("auto", resume="logged", choices=("auto", "bfloat16", "float16", "float32"))
    """auto (what the trainer computes in), bfloat16, float16, float32."""
    quantization: str | None = option(None, resume="logged", choices=("fp8",))
    """fp8: vLLM computes the linear layers of the blocks in 8 bits, and rounds each version of the
    weights anew (on GPUs; needs a correction, docs/rollout_engines.md); null: in `dtype`."""
    kv_cache_dtype: str = option("auto", resume="logged", choices=("auto", "fp8"))
    """What vLLM keeps keys and values in: auto (`dtype`), or fp8, a byte (needs a correction)."""
    max_num_seqs: int | None = option(None, resume="free", ge=1)
    """Trajectories decoded at once by one engine; null for its part of a step or of a validation
    request, whichever is more, up to 512 (256 on CPU)."""
    merge_adapter: bool | None = option(None, resume="logged")
    """Give the engine the policy with its adapter merged, not the adapter; null means true on CPU,
    where vLLM computes an adapter more slowly than the model below it, and false on GPU."""
    enforce_eager: bool | None = option(None, resume="free")
    """Skip graph capture and compilation; null means true on CPU and false on GPU."""
    speculative_config: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    log_prob_max_token_len_per_gpu: int | None = option(None, resume="free", ge=1)
    """Token budget of a forward without gradient; null for twice the actor's."""
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)


@dataclass
class RefConfig:
    """The frozen reference policy."""

    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)


@dataclass
class ActorRolloutRefConfig:
    """Policy: its weights, update, generation and reference."""

    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    ref: RefConfig = field(default_factory=RefConfig)


@dataclass
class CriticModelConfig(BlocksConfig):
    """The critic's weights; with an adapter beside the policy's, both share one base."""

    path: str | None = option(None, resume="free")
    """Folder of the model whose trunk the critic starts from; null for the policy's."""
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)


@dataclass
class CriticConfig:
    """The value function; used by adv_estimator=gae only."""

    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    n_gpus_per_node: int | None = option(None, resume="free", ge=1)
    """GPUs of a node (on CPU: processes) for the critic alone, which then works while the actor
    does; null: it shares the actor's."""
    nnodes: int | None = option(None, resume="free", ge=1)
    """Nodes that hold those GPUs; null for as many as `trainer.nnodes`."""
    ppo_micro_batch_size: int | None = option(None, resume="free", ge=1)
    """As the actor's."""
    ppo_max_token_len_per_gpu: int | None = option(None, resume="free", ge=1)
    """As the actor's; null for twice the actor's."""
    ulysses_sequence_parallel_size: int | None = option(None, resume="free", ge=1)
    """As the actor's; null for the actor's."""
    ppo_mini_batch_size: int | None = option(None, resume="experiment", ge=1)
    """Trajectories per critic step; null for the actor's."""
    ppo_epochs: int = option(1, resume="experiment", ge=1, le=1000)
    """Passes over a step's trajectories."""
    grad_clip: float = option(1.0, resume="logged", gt=0)
    """Gradient norm bound."""
    cliprange_value: float = option(0.5, resume="logged", gt=0)
    """How far a value may move from the old one before its loss is clipped."""
