"""Options of the policy (weights, update, rollout, reference) and of the critic."""

from dataclasses import dataclass, field
from typing import Any

from verl.config.correction import Correction
from verl.config.data import MISSING
from verl.config.option import option

ALL_LINEAR = "all-linear"
SELECTIVE = "selective"
CHECKPOINTING_MODES = (True, False, SELECTIVE)
"""Activations of a block that are recomputed in backward: all, none, or the cheap ones."""
DTYPES = ("bfloat16", "float16", "float32")
"""Number formats of weights, by torch's names (`verl.training.devices.DTYPES`)."""
EXPORTED = DTYPES[0]
"""Number format of an exported model, unless another one is asked for."""
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks that vLLM can reserve memory for; an adapter uses the next larger one."""


@dataclass
class AdapterConfig:
    """A LoRA adapter: each target matrix W becomes W + lora_alpha / lora_rank · B A."""

    lora_rank: int = option(0, resume="fixed", ge=0, le=512)
    """Rank of A and B; 0 trains all weights, without an adapter."""
    lora_alpha: float = option(16.0, resume="fixed", gt=0)
    """Numerator of the adapter's scale; twice the rank is usual."""
    target_modules: Any = option(ALL_LINEAR, resume="fixed")
    """all-linear (every linear layer except the output head), or a list such as [q_proj,v_proj]."""

    @property
    def has_adapter(self) -> bool:
        """Whether only an adapter is trained, while the base weights stay frozen."""
        return self.lora_rank > 0

    @property
    def is_frozen(self) -> bool:
        """Whether the model's own weights stay as they are; what is trained stands beside them."""
        return self.has_adapter


@dataclass
class OptimConfig:
    """AdamW and its schedule: linear warm-up, then constant."""

    lr: float = option(1e-6, resume="logged", gt=0, le=1)
    """Peak learning rate."""
    lr_warmup_steps_ratio: float = option(0.0, resume="logged", ge=0, le=1)
    """Fraction of all optimizer steps over which lr rises linearly from 0."""
    weight_decay: float = option(0.01, resume="logged", ge=0, le=10)
    """Decoupled weight decay."""


@dataclass
class FrozenFsdpConfig:
    """Offloading of an FSDP2 model without an optimizer; it has no effect on CPU.

    Null options are decided from the memory estimate before the run starts
    (`verl.ext.memory.check`). Without an estimate, offloading is on.
    """

    param_offload: bool | None = option(None, resume="free")
    """Keep parameters, gradients and optimizer state in host memory (CPU offload of FSDP2); null
    does so where the device lacks the memory."""


@dataclass
class FsdpConfig(FrozenFsdpConfig):
    """Offloading and resharding of an FSDP2 model that is trained."""

    optimizer_offload: bool | None = option(None, resume="free")
    """Move optimizer state to the host between updates; null does so if the device lacks memory."""
    reshard_each: bool | None = option(True, resume="free")
    """Shard weights and gradients again after every micro-batch of an update. false keeps both
    unsharded until the last micro-batch; null does so where the GPUs have the memory by the
    estimate."""


@dataclass
class BlocksConfig(AdapterConfig):
    """A trained model, and how its transformer blocks compute."""

    enable_gradient_checkpointing: bool | str | None = option(
        True, resume="free", choices=CHECKPOINTING_MODES
    )
    """Recompute block activations in backward: less memory, about a third more compute. selective
    keeps the results of matrix products and attention, half of all activations, and recomputes the
    rest at little cost. null picks the first of false, selective and true
    that fits into GPU memory by the estimate."""


@dataclass
class ModelConfig(BlocksConfig):
    """The policy's weights, and how its forward pass runs."""

    path: str = option(MISSING, resume="free", path="model")
    """Folder or hub name of a Hugging Face causal language model."""
    trust_remote_code: bool = option(False, resume="free")
    """Run code that comes with the models, as some of them need. It runs with your permissions:
    enable this only for authors whom you trust."""


@dataclass
class ActorConfig:
    """The policy update."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    ppo_mini_batch_size: int = option(256, resume="experiment", ge=1)
    """Trajectories per optimizer step, over all ranks. More than a step has is refused, except for
    the default, which then takes the whole step."""
    ppo_max_token_len_per_gpu: int | None = option(None, resume="free", ge=1)
    """Token budget of one packed forward pass per rank (a sequence-parallel group adds up its
    ranks'); null is 16,384, on GPUs less if the estimate of memory says so."""
    ulysses_sequence_parallel_size: int = option(1, resume="free", ge=1)
    """Size of a sequence-parallel group: ranks that compute each dialogue together
    (docs/guides/models.md). Must divide the number of ranks and of the model's attention heads."""
    ppo_epochs: int = option(1, resume="experiment", ge=1, le=1000)
    """Passes over the trajectories of a step."""
    grad_clip: float = option(1.0, resume="logged", gt=0)
    """Maximum gradient norm."""
    clip_ratio: float = option(0.2, resume="logged", gt=0, le=1000)
    """PPO's epsilon for ratios below 1, and above 1 unless `clip_ratio_high` is set."""
    clip_ratio_high: float | None = option(None, resume="logged", gt=0, le=1000)
    """Epsilon for ratios above 1 (clip-higher); null uses `clip_ratio`."""
    clip_ratio_c: float = option(3.0, resume="logged", gt=1)
    """Dual-clip bound for negative advantages (policy_loss=ppo)."""
    policy_loss: str = option(
        "ppo",
        resume="experiment",
        choices="verl.core_algos.policy_losses:POLICY_LOSSES",
        or_file=True,
    )
    """Policy loss: ppo (clipping, dual clip), gspo (sequence-level ratio), cispo (clipped
    importance weight), gpg (no ratio), or path/file.py:name (docs/explanation/algorithms.md)."""
    loss_agg_mode: str = option(
        "token-mean", resume="logged", choices="verl.core_algos.losses:AGGREGATIONS"
    )
    """Aggregation of token losses: token-mean, seq-mean-token-sum, seq-mean-token-mean, or
    seq-mean-token-sum-norm (divided by the maximum tokens that a trajectory may sample)."""
    entropy_coeff: float = option(0.0, resume="logged", ge=-10, le=10)
    """Weight of the entropy bonus."""
    use_kl_loss: bool = option(False, resume="logged")
    """Add the KL to the reference policy to the loss (requires the reference)."""
    kl_loss_coef: float = option(0.001, resume="logged", ge=0, le=1000)
    """Weight of the KL in the loss."""
    kl_loss_type: str = option("low_var_kl", resume="logged", choices="verl.core_algos.kl:KL_KINDS")
    """KL estimator in the loss: kl, abs, mse, low_var_kl."""
    terms: dict[str, Any] = option(factory=dict, resume="logged")
    """Weights of further terms per token, {llds: 0.1}: llds (lost likelihood of good trajectories),
    sibling (self-distillation from a right answer of the group), teacher (distillation from another
    model), both experimental; docs/explanation/algorithms.md."""
    teacher: dict[str, Any] = option(factory=dict, resume="logged")
    """The model of terms.teacher, on a server of vLLM: {url: http://host:8000, served_model: NAME},
    and trajectories (wrong or all) and api_key_env."""
    old_log_probs: str | None = option(None, resume="logged", choices=("recompute", "engine"))
    """Denominator of the loss's probability ratio: recompute (the trainer's log-probs before the
    step's updates) or engine (the log-probs of sampling); null is engine if rollout.max_staleness
    is above 0, else recompute."""
    rollout_correction: dict[str, Any] = option(factory=dict, resume="logged")
    """Importance weights of trainer against engine probabilities, and a mask by their ratio:
    {rollout_is: token}, with the other settings of docs/explanation/algorithms.md."""
    state_masking: bool = option(True, resume="experiment")
    """Mask observation tokens in the loss; false also trains on documents (ablation)."""

    @property
    def kl_in_loss(self) -> bool:
        """Whether KL to the reference is a term of the policy loss."""
        return self.use_kl_loss and self.kl_loss_coef > 0

    @property
    def llds_coef(self) -> float:
        """Weight of the penalty on lost likelihood; the published value is 0.1."""
        return float(self.terms.get("llds", 0.0))

    @property
    def correction(self) -> Correction:
        """The settings of `rollout_correction`, with defaults."""
        return Correction(**self.rollout_correction)

    @property
    def ranks_per_shard(self) -> int:
        """Ranks that compute each dialogue together."""
        return self.ulysses_sequence_parallel_size


@dataclass
class ValSamplingConfig:
    """Sampling of validation, greedy by default."""

    temperature: float = option(0.0, resume="logged", ge=0, le=10)
    """Sampling temperature of validation; 0 is greedy."""
    top_p: float = option(1.0, resume="logged", gt=0, le=1)
    """Top-p (nucleus) threshold of validation sampling."""


@dataclass
class RolloutConfig:
    """Generation of trajectories."""

    name: str = option("vllm", resume="logged", path="code")
    """Rollout engine: vllm, transformers (small models), remote (a server
    with fixed weights: not for training), or path/file.py:Name (docs/guides/rollouts.md)."""
    url: Any = option(None, resume="free")
    """Addresses of your vLLM servers, each of which is one engine and loads every weight version
    (docs/guides/rollouts.md). With name=remote, the address of an OpenAI-compatible server.
    """
    weight_sync: str = option(
        "files", resume="free", choices=("files", "ipc", "nccl"), or_file=True
    )
    """Transfer of new weights: files (in shared memory), ipc (memory of the device that ranks and
    engines share), nccl (to engines on their own devices, trainer.rollout_gpus; gloo on CPU), or
    path/file.py:Name."""
    server: dict[str, Any] = option(factory=dict, resume="free")
    """Settings of `url`: `weights_dir`, a folder through which ranks pass new weights to your
    servers, with the same path on both sides (default: shared memory of this machine);
    `served_model`, the model's name there (default: the server's model, or with name=remote the
    model's path); `api_key_env`, the variable with the key."""
    n_agent: int = option(1, resume="experiment", ge=1)
    """Trajectories sampled per prompt (GRPO's group size)."""
    temperature: float = option(1.0, resume="logged", ge=0, le=10)
    """Sampling temperature of training."""
    top_p: float = option(1.0, resume="logged", gt=0, le=1)
    """Top-p (nucleus) threshold of training; below 1, log-probs of engine and trainer differ."""
    gpu_memory_utilization: float = option(0.6, resume="free", gt=0, le=1)
    """Fraction of a GPU's memory that vLLM may use; 0.9 is usual with trainer.rollout_gpus."""
    cpu_kv_cache_gib: int = option(2, resume="free", ge=1)
    """KV cache of one engine on CPU, or of name=transformers anywhere, in GiB."""
    tensor_model_parallel_size: int = option(1, resume="free", ge=1)
    """GPUs per engine (tensor parallelism)."""
    num_replicas: int | None = option(None, resume="free", ge=1)
    """Number of engines; null is as many as fit on the GPUs (one per node on CPU)."""
    max_staleness: int = option(0, resume="logged", ge=0, le=64)
    """Maximum age of a token in weight versions when it is trained on; 0 alternates sampling and
    training, more samples up to that many steps ahead (docs/guides/rollouts.md)."""
    replay: str | None = option(None, resume="free", path="file")
    """Folder `schedule` of a run to replay: each turn uses the same weight version as there."""
    partial: bool = option(True, resume="logged")
    """Continue trajectories with newer weights at their next turn; false keeps one version each."""
    dtype: str = option("auto", resume="logged", choices=("auto", *DTYPES))
    """Number format of the engine: auto (the trainer's), bfloat16, float16, float32."""
    max_num_seqs: int | None = option(None, resume="free", ge=1)
    """Maximum trajectories that one engine decodes at once; null is its share of a step or of a
    validation request, whichever is larger, up to 512 (256 on CPU)."""
    merge_adapter: bool | None = option(None, resume="logged")
    """Send engines the policy with its adapter merged in, instead of the adapter; null is true on
    CPU and false on GPU."""
    engine_kwargs: dict[str, Any] = option(factory=dict, resume="logged")
    """Further arguments for vLLM's engine, passed on as they are: {enforce_eager: true}. Without a
    correction, quantized weights or caches are refused (docs/guides/rollouts.md)."""
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)

    @property
    def log_prob_temperature(self) -> float:
        """Temperature of the policy whose log-probs are trained: 1 for greedy sampling."""
        return self.temperature or 1.0

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses of the user's servers that load new weights; empty if the run starts engines.

        An OpenAI-compatible server (name=remote) keeps its weights.
        """
        if self.url is None or self.name == "remote":
            return ()
        return tuple(self.url) if isinstance(self.url, list) else (str(self.url),)

    @property
    def num_weight_versions(self) -> int:
        """Maximum number of weight versions kept available to engines at once."""
        return 2 if self.max_staleness else 1

    @property
    def weights_dir(self) -> str | None:
        """Folder through which ranks pass new weights to servers; None is shared memory."""
        return self.server.get("weights_dir")

    @property
    def served_model(self) -> str | None:
        """Model name at `url`; None is the server's own."""
        return self.server.get("served_model")

    @property
    def api_key_env(self) -> str | None:
        """Variable with the server's key; None is OPENAI_API_KEY, for https://api.openai.com."""
        return self.server.get("api_key_env")


@dataclass
class RefConfig:
    """The frozen reference policy."""

    fsdp_config: FrozenFsdpConfig = field(default_factory=FrozenFsdpConfig)


@dataclass
class ActorRolloutRefConfig:
    """The policy: weights, update, rollout and reference."""

    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    ref: RefConfig = field(default_factory=RefConfig)


@dataclass
class CriticModelConfig(BlocksConfig):
    """The critic's weights. If policy and critic both have adapters, they share one base model."""

    path: str | None = option(None, resume="free", path="model")
    """Folder of the model from which the critic's trunk is initialised; null uses the policy's."""
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)


@dataclass
class CriticConfig:
    """The value function; used only by adv_estimator=gae."""

    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    n_gpus_per_node: int | None = option(None, resume="free", ge=1)
    """GPUs on each of `trainer.nnodes` nodes (on CPU: processes) reserved for the critic, which
    then works at the same time as the actor; null shares the actor's."""
    ppo_max_token_len_per_gpu: int | None = option(None, resume="free", ge=1)
    """As the actor's; null is up to twice the actor's."""
    ppo_mini_batch_size: int | None = option(None, resume="experiment", ge=1)
    """Trajectories per optimizer step of the critic; null is the actor's."""
    ppo_epochs: int = option(1, resume="experiment", ge=1, le=1000)
    """Passes over the trajectories of a step."""
    grad_clip: float = option(1.0, resume="logged", gt=0)
    """Maximum gradient norm."""
    cliprange_value: float = option(0.5, resume="logged", gt=0)
    """Maximum change of a value from its old value before its loss is clipped."""
