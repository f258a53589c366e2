"""The configuration of a training run: all sections, and values derived from several options."""

from dataclasses import dataclass, field

from verl.config.agent import DialogueOptions
from verl.config.algorithm import AlgorithmConfig
from verl.config.data import DataConfig
from verl.config.option import option
from verl.config.placement import Placement, plan
from verl.config.policy import ActorRolloutRefConfig, CriticConfig, ValSamplingConfig
from verl.config.reward import RewardConfig
from verl.config.trainer import TrainerConfig
from verl.plugins import is_path

MAX_SEQS_ON_GPU, MAX_SEQS_ON_CPU = 512, 256
"""Default limit of the trajectories that an engine decodes at once: vLLM reserves logits for each
of them, and captures CUDA graphs of at most 512."""


@dataclass
class Config(DialogueOptions):
    """All options of a training run."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    reward_model: RewardConfig = field(default_factory=RewardConfig)
    compat: str = option("none", resume="experiment", choices=("none", "search_r1"))
    """search_r1: GAE, its whitening and validation as in the original, for comparisons
    (docs/explanation/algorithms.md)."""

    @property
    def is_as_original(self) -> bool:
        """Whether the run computes as the original Search-R1 did, instead of as documented."""
        return self.compat == "search_r1"

    @property
    def placement(self) -> Placement:
        """Which devices hold ranks, critic and engines."""
        return plan(self)

    @property
    def samples_rollouts(self) -> bool:
        """Whether engines sample the trajectories (they are not read from a recorded run)."""
        return self.data.rollouts is None

    @property
    def accepts_other_rows(self) -> bool:
        """Whether a resumed run may have other training rows than the checkpoint's."""
        return "data" in self.trainer.resume_anyway

    @property
    def kl_in_reward(self) -> bool:
        """Whether KL to the reference is subtracted from the reward (and is not in the loss)."""
        return not self.actor_rollout_ref.actor.use_kl_loss and self.algorithm.kl_ctrl.kl_coef > 0

    @property
    def needs_reference(self) -> bool:
        """Whether the run needs a frozen reference policy."""
        return self.kl_in_reward or self.actor_rollout_ref.actor.kl_in_loss

    @property
    def needs_every_trajectory(self) -> bool:
        """Whether updates include zero-advantage trajectories: other loss terms need them."""
        actor = self.actor_rollout_ref.actor
        has_terms = actor.kl_in_loss or actor.entropy_coeff != 0 or actor.llds_coef > 0
        return has_terms or is_path(actor.policy_loss)  # a loss that we do not know

    @property
    def old_log_probs(self) -> str:
        """Denominator of the policy loss's ratio, null resolved: recompute or engine."""
        chosen = self.actor_rollout_ref.actor.old_log_probs
        is_stale = self.actor_rollout_ref.rollout.max_staleness > 0
        return chosen or ("engine" if is_stale else "recompute")

    @property
    def reads_engine_log_probs(self) -> bool:
        """Whether updates need the engines' log-probs: as old log-probs, or for a correction."""
        actor = self.actor_rollout_ref.actor
        return not actor.correction.is_none or self.old_log_probs == "engine"

    @property
    def max_policy_tokens(self) -> int:
        """Maximum tokens that the policy may sample in one trajectory."""
        data = self.data
        return min((self.max_turns + 1) * data.max_response_length, data.max_model_len)

    @property
    def val_sampling(self) -> ValSamplingConfig:
        """Sampling parameters of validation."""
        rollout = self.actor_rollout_ref.rollout
        if self.is_as_original:
            return ValSamplingConfig(rollout.temperature, rollout.top_p)
        return rollout.val_kwargs

    @property
    def critic_path(self) -> str:
        """Folder of the weights from which the critic starts."""
        return self.critic.model.path or self.actor_rollout_ref.model.path

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories in one training step."""
        return self.data.train_batch_size * self.actor_rollout_ref.rollout.n_agent

    def max_num_seqs(self, on_gpu: bool) -> int:
        """Maximum trajectories that one engine decodes at once: the option, or its share of a step.

        Engines receive whole groups if there are enough groups (`verl.packing.scheduling_units`).
        """
        rollout, engines = self.actor_rollout_ref.rollout, self.placement.num_engines(on_gpu)
        if rollout.max_num_seqs is not None:
            return rollout.max_num_seqs
        groups = self.data.train_batch_size
        share = -(-self.num_trajectories // engines)
        if groups >= engines:
            share = -(-groups // engines) * rollout.n_agent
        limit = MAX_SEQS_ON_GPU if on_gpu else MAX_SEQS_ON_CPU
        return min(limit, max(share, -(-self.data.val_batch_size // engines)))

    @property
    def updates_per_step(self) -> int:
        """Number of the actor's optimizer steps in one training step."""
        actor = self.actor_rollout_ref.actor
        return -(-self.num_trajectories // actor.ppo_mini_batch_size) * actor.ppo_epochs
