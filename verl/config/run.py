"""A training run: all sections together, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl.config.agent import AgentConfig, ServerConfig
from verl.config.algorithm import AlgorithmConfig, CompatConfig
from verl.config.data import DataConfig
from verl.config.option import option
from verl.config.policy import ActorRolloutRefConfig, CriticConfig, ValSamplingConfig
from verl.config.reward import RewardConfig
from verl.config.trainer import TrainerConfig

MAX_SEQS_ON_GPU, MAX_SEQS_ON_CPU = 512, 256
"""Trajectories that an engine decodes at once unless more are asked for: each reserves logits, and
vLLM captures graphs of no more than 512."""


@dataclass
class Config:
    """A training run."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    reward_model: RewardConfig = field(default_factory=RewardConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    retriever: ServerConfig = field(default_factory=ServerConfig)
    compat: CompatConfig = field(default_factory=CompatConfig)
    max_turns: int = option(2, resume="experiment", ge=0, le=10_000)
    """Turns of a trajectory that may call tools; a last turn without follows."""
    do_search: bool = option(True, resume="experiment")
    """False runs without tools and their servers: a call is then an invalid action."""
    template: str = option("search_r1", resume="experiment")
    """Prompt and observation wording: a template of docs/tools.md, or `tools`, whose
    words are the descriptions of the tools."""

    @property
    def calls_tools(self) -> bool:
        """The tools are asked, and the run depends on their servers."""
        return self.do_search and self.max_turns > 0

    @property
    def samples_rollouts(self) -> bool:
        """Engines sample what is learned from: it is not read from a record."""
        return self.data.rollouts is None

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
        """The policy loss has more terms than the advantage's: no trajectory can be left out."""
        actor = self.actor_rollout_ref.actor
        has_terms = self.kl_in_loss or actor.entropy_coeff != 0 or actor.llds_coef > 0
        return has_terms or not actor.skip_zero_advantages

    @property
    def old_log_probs(self) -> str:
        """recompute or engine: what the ratio of the policy loss compares with."""
        chosen = self.actor_rollout_ref.actor.old_log_probs
        is_stale = self.actor_rollout_ref.rollout.max_staleness > 0
        return chosen or ("engine" if is_stale else "recompute")

    @property
    def reads_engine_log_probs(self) -> bool:
        """Updates read the log-probs that engines told: as the old ones, or for a correction."""
        actor = self.actor_rollout_ref.actor
        is_corrected = actor.rollout_is != "none" or actor.rollout_mask_threshold is not None
        return is_corrected or self.old_log_probs == "engine"

    @property
    def max_policy_tokens(self) -> int:
        """Tokens that the policy may sample in one trajectory."""
        data = self.data
        return min((self.max_turns + 1) * data.max_response_length, data.max_model_len)

    @property
    def overlong_max_length(self) -> int:
        """Policy tokens at which the overlong penalty is full."""
        return self.algorithm.overlong_buffer.max_length or self.max_policy_tokens

    @property
    def overlong_length(self) -> int:
        """Policy tokens over which the overlong penalty rises."""
        return self.algorithm.overlong_buffer.length or max(1, self.overlong_max_length // 5)

    @property
    def val_sampling(self) -> ValSamplingConfig:
        """How validation samples."""
        rollout = self.actor_rollout_ref.rollout
        if self.compat.sampled_validation:
            return ValSamplingConfig(rollout.temperature, rollout.top_p)
        return rollout.val_kwargs

    @property
    def shares_base(self) -> bool:
        """Policy and critic are adapters of one base, which is loaded once."""
        policy, critic = self.actor_rollout_ref.model, self.critic.model
        is_same = critic.path in (None, policy.path) and not self.has_own_critic
        return policy.has_adapter and critic.has_adapter and is_same

    @property
    def critic_path(self) -> str:
        """The weights that a critic starts from."""
        return self.critic.model.path or self.actor_rollout_ref.model.path

    @property
    def num_ranks(self) -> int:
        """Training ranks over all nodes; of a critic on devices of its own, the actor's alone."""
        return self.trainer.n_gpus_per_node * self.trainer.nnodes

    @property
    def num_sp_groups(self) -> int:
        """Sequence-parallel groups of the actor's ranks, over all nodes."""
        return self.num_ranks // self.actor_rollout_ref.actor.ulysses_sequence_parallel_size

    @property
    def critic_sp_size(self) -> int:
        """Ranks in a sequence-parallel group of the critic."""
        own = self.critic.ulysses_sequence_parallel_size
        return own or self.actor_rollout_ref.actor.ulysses_sequence_parallel_size

    @property
    def num_critic_sp_groups(self) -> int:
        """Sequence-parallel groups of the ranks that hold a critic, over all nodes."""
        return self.num_critic_ranks // self.critic_sp_size

    @property
    def has_own_critic(self) -> bool:
        """The critic has ranks and devices of its own, beside those of the actor."""
        return self.critic.n_gpus_per_node is not None

    @property
    def critic_gpus_per_node(self) -> int:
        """GPUs of a node that a critic has for itself."""
        return self.critic.n_gpus_per_node or 0

    @property
    def critic_nodes(self) -> int:
        """Nodes that a critic on devices of its own lies on."""
        return self.critic.nnodes or self.trainer.nnodes

    @property
    def num_critic_ranks(self) -> int:
        """Ranks that hold a critic: its own, or the actor's."""
        own = self.critic_gpus_per_node * self.critic_nodes
        return own or self.num_ranks

    @property
    def is_split(self) -> bool:
        """Engines have devices of their own, beside those of the ranks."""
        return self.trainer.rollout_gpus > 0

    @property
    def is_external(self) -> bool:
        """Engines are servers that the user started, and that take new weights."""
        rollout = self.actor_rollout_ref.rollout
        return rollout.url is not None and rollout.name != "remote"

    @property
    def servers(self) -> list[str]:
        """Addresses of the servers, an engine each; none where the run starts its own."""
        url = self.actor_rollout_ref.rollout.url
        given = url if isinstance(url, list) else [str(url)]
        return given if self.is_external else []

    @property
    def streams_weights(self) -> bool:
        """Ranks send new weights to engines, without files."""
        return self.actor_rollout_ref.rollout.weight_sync != "files"

    @property
    def num_weight_versions(self) -> int:
        """Versions of the weights that lie ready for engines at once, at most."""
        return 2 if self.actor_rollout_ref.rollout.max_staleness else 1

    @property
    def is_colocated(self) -> bool:
        """Engines lie on the ranks' devices, where on GPUs one side sleeps."""
        return not self.is_split and not self.is_external

    @property
    def engine_gpus_per_node(self) -> int:
        """GPUs of a node that engines lie on: their own, or the ranks'."""
        return self.trainer.rollout_gpus or self.trainer.n_gpus_per_node

    @property
    def engine_slots(self) -> int:
        """Engines that the GPUs of all nodes hold; each lies within a node."""
        size = self.actor_rollout_ref.rollout.tensor_model_parallel_size
        return self.engine_gpus_per_node // size * self.trainer.nnodes

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node that ranks, engines and a critic of its own have together, at most."""
        trainer = self.trainer
        return trainer.n_gpus_per_node + trainer.rollout_gpus + self.critic_gpus_per_node

    @property
    def num_gpus(self) -> int:
        """GPUs of the run, over all nodes."""
        per_node = self.trainer.n_gpus_per_node + self.trainer.rollout_gpus
        return per_node * self.trainer.nnodes + self.critic_gpus_per_node * self.critic_nodes

    @property
    def num_trajectories(self) -> int:
        """Trajectories of one training step."""
        return self.data.train_batch_size * self.actor_rollout_ref.rollout.n_agent

    def num_engines(self, on_gpu: bool) -> int:
        """Rollout engines over all nodes."""
        rollout = self.actor_rollout_ref.rollout
        if self.is_external:
            return len(self.servers)
        return rollout.num_replicas or (self.engine_slots if on_gpu else self.trainer.nnodes)

    def max_num_seqs(self, on_gpu: bool) -> int:
        """Trajectories that one engine decodes at once: what was asked for, or all it is given.

        An engine is given whole groups where there are enough (`verl.packing.scheduling_units`).
        """
        rollout, engines = self.actor_rollout_ref.rollout, self.num_engines(on_gpu)
        if rollout.max_num_seqs is not None:
            return rollout.max_num_seqs
        groups = self.data.train_batch_size
        step = -(-self.num_trajectories // engines)
        if groups >= engines:
            step = -(-groups // engines) * rollout.n_agent
        most = MAX_SEQS_ON_GPU if on_gpu else MAX_SEQS_ON_CPU
        return min(most, max(step, -(-self.data.val_batch_size // engines)))

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of the actor in one training step."""
        actor = self.actor_rollout_ref.actor
        return -(-self.num_trajectories // actor.ppo_mini_batch_size) * actor.ppo_epochs
