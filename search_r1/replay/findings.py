"""What came of a replay, as data and in words: how like the record it is, and what it is worth.

Its advantage and its gradient are those of the recorded step with the one trajectory put in the
place of the other. The gradient is that of the policy loss where the weights that sampled are the
ones being trained.
"""

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from search_r1.inference.model import model_folder
from search_r1.replay.playing import Edit, Likeness, compared, turns_of
from verl.config import Config
from verl.core_algos.advantages import ADVANTAGES
from verl.core_algos.kl import FixedKLController
from verl.core_algos.losses import loss_weights, weighted_sum
from verl.core_algos.policy_losses import POLICY_LOSSES, PolicyLossInputs
from verl.data.trajectories import RecordedTrajectory, make_row
from verl.rewards.interface import Reward, RewardManager
from verl.trainer.collection import Samples
from verl.trainer.learning import add_advantages, assemble
from verl.training.actor import TargetColumns, loss_mask
from verl.training.devices import resolve_device, rollout_dtype
from verl.training.models import LogProbModel, PackedInputs, load_causal_lm
from verl.types import Origin, Status, TokenBatch, Trajectory


@dataclass(frozen=True)
class Gradients:
    """Of the recorded trajectory and of the replayed one; cosines are null beside a zero."""

    norm_recorded: float
    norm_replayed: float
    norm_of_change: float
    cosine: float | None
    cosine_of_change: float | None
    """Of the change with the recorded one: below 0 where it takes away from it."""


def without_advantage(config: Config) -> str:
    """What cannot be told from the record alone; empty where all of the advantage can."""
    estimator = config.algorithm.adv_estimator
    if ADVANTAGES[estimator].needs_critic:
        return f"no advantage: {estimator} needs the critic's values, which are not recorded"
    return "the advantage is that of the scores, without the KL in the reward" * config.kl_in_reward


def learned(
    config: Config, step: Sequence[RecordedTrajectory], place: int, one: RecordedTrajectory
) -> TokenBatch:
    """The trajectory at `place` of its step as the run would learn from it, be it another `one`.

    One sequence, with `advantages` and its `loss_weights` within all that the step sampled.
    """
    rows = [one if i == place else row for i, row in enumerate(step)]
    greedy = [row.greedy_score for row in rows if row.greedy_score is not None]
    config = copy.deepcopy(config)
    config.trainer.share_prompts, config.algorithm.kl_ctrl.kl_coef = False, 0.0
    samples = Samples([row.trajectory for row in rows], [row.reward for row in rows], greedy)
    batch = assemble(samples, config)
    add_advantages(batch, config, FixedKLController(0.0))
    batch.tokens["loss_weights"] = loss_weights(
        batch.tokens["loss_mask"], batch.offsets, config.actor_rollout_ref.actor.loss_agg_mode,
        float(config.max_policy_tokens),
    )  # fmt: skip
    return batch.select([place])


def advantage(batch: TokenBatch) -> float:
    """The mean over the tokens that are learned from."""
    found = batch.tokens["advantages"][loss_mask(batch)]
    return float(found.mean()) if len(found) else math.nan


def gradients(config: Config, folder: Path, recorded: TokenBatch, other: TokenBatch) -> Gradients:
    """The two at the weights of a Hugging Face folder, computed in float32."""
    device = resolve_device(config.trainer.device)
    model = LogProbModel(load_causal_lm(str(folder)))
    model.to(device)
    before, after = (_gradient(config, model, one, device) for one in (recorded, other))
    change = [b - a for a, b in zip(before, after, strict=True)]
    norms = [math.sqrt(_dot(one, one)) for one in (before, after, change)]
    return Gradients(
        norms[0], norms[1], norms[2],
        _cosine(_dot(before, after), norms[0] * norms[1]),
        _cosine(_dot(before, change), norms[0] * norms[2]),
    )  # fmt: skip


def _gradient(
    config: Config, model: LogProbModel, batch: TokenBatch, device: torch.device
) -> list[Tensor]:
    """Of the sequence's share of the policy loss, by parameter."""
    actor = config.actor_rollout_ref.actor
    inputs = PackedInputs.of(batch, loss_mask(batch), device)
    columns = TargetColumns(batch, inputs)
    log_probs, _ = model(inputs, config.actor_rollout_ref.rollout.temperature or 1.0)
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    given = PolicyLossInputs(
        log_probs, log_probs.detach(), columns["advantages"], columns.sequence_ids,
        actor.clip_ratio, high, actor.clip_ratio_c,
    )  # fmt: skip
    losses, _ = POLICY_LOSSES[actor.policy_loss](given)
    model.zero_grad(set_to_none=True)
    weighted_sum(losses, columns["loss_weights"]).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def _dot(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Summed in float64."""
    return sum(float((a.double() * b.double()).sum()) for a, b in zip(one, other, strict=True))


def _cosine(product: float, norms: float) -> float | None:
    return product / norms if norms else None


@dataclass(frozen=True)
class Place:
    """A recorded trajectory: the line in its step's file, with all of the step."""

    step: int
    line: int
    rows: Sequence[RecordedTrajectory]

    def __str__(self) -> str:
        return f"{self.step}:{self.line}"

    @property
    def recorded(self) -> RecordedTrajectory:
        return self.rows[self.line]


@dataclass(frozen=True)
class Replay:
    place: Place
    trajectory: Trajectory
    wanted: int
    """The version of the weights that sampled the turn that is replayed first."""
    used: int
    """The same, or the nearest that there is."""
    source: str
    """Where those are: a checkpoint, or the model that the run began with."""
    num_asked: int
    """Calls that were never recorded, and so asked of the tools now."""


def findings(
    config: Config, one: Replay, edit: Edit, reward: RewardManager, with_gradient: bool
) -> dict[str, Any]:
    """A replay as JSON: `row` is the trajectory as a run records it."""
    place, recorded, trajectory = one.place, one.place.recorded, one.trajectory
    likeness = compared(recorded.trajectory, trajectory, edit.turn)
    has_failed, problem = trajectory.status is Status.FAILED, without_advantage(config)
    found = Reward(math.nan) if has_failed else reward([trajectory])[0]
    new = RecordedTrajectory(trajectory, found, recorded.greedy_score)
    notes, worth = list(remarks(config, one, edit, likeness)), dict[str, Any]()
    if problem:
        notes.append(f"{problem[0].upper()}{problem[1:]}.")
    if not has_failed and not ADVANTAGES[config.algorithm.adv_estimator].needs_critic:
        batches = [learned(config, place.rows, place.line, row) for row in (recorded, new)]
        worth["advantage"] = _pair(*map(advantage, batches))
        if with_gradient:
            with model_folder(one.source, "float32") as folder:
                worth["gradient"] = dataclasses.asdict(gradients(config, folder, *batches))
    return {
        "trajectory": str(place),
        "turn": edit.turn,
        "edited": edit.changes,
        "verdict": verdict(edit, likeness, trajectory),
        "notes": notes,
        "identical": likeness.differs_at is None and likeness.largest == 0,
        **dataclasses.asdict(likeness),
        "score": _pair(recorded.reward.score, found.score),
        **worth,
        "row": make_row(place.step, len(place.rows), new)
        | {"score": None if has_failed else found.score},
    }


def _pair(recorded: float, replayed: float) -> dict[str, float | None]:
    pair = {"recorded": recorded, "replayed": replayed}
    return {name: value if math.isfinite(value) else None for name, value in pair.items()}


def verdict(edit: Edit, likeness: Likeness, trajectory: Trajectory) -> str:
    """How like the record it is, in one sentence."""
    if trajectory.status is Status.FAILED:
        return f"The replay ends where a tool failed: {trajectory.error}"
    where = f" from turn {edit.turn} on" if edit.turn > 1 else ""
    count = likeness.num_tokens
    tokens = f"{count} token{'s' * (count != 1)} of the policy{where}"
    if likeness.differs_at is not None:
        segment, token = likeness.differs_at
        spoken = [s.origin is Origin.POLICY for s in trajectory.segments[: segment + 1]]
        is_turn = len(spoken) > segment and spoken[-1]
        place = f"{'' if is_turn else 'what followed '}turn {sum(spoken)}"
        cause = (
            f"With the edited {' and '.join(edit.changes)}" if edit.changes else "Without an edit"
        )
        return f"{cause} it differs first at token {token + 1} of {place}, after {tokens}."
    if likeness.largest == 0:
        return f"Bit-identical to the record: all {tokens}, and their log-probs."
    return f"The record's tokens: all {tokens}; log-probs differ by up to {likeness.largest:.1e}."


def remarks(config: Config, one: Replay, edit: Edit, likeness: Likeness) -> Iterator[str]:
    """What a reader must know of how it was replayed, and why an unedited one may differ."""
    if one.used != one.wanted:
        yield (f"The run keeps no checkpoint with weights {one.wanted} (trainer.save_freq=1 keeps "
               f"each): replayed by the nearest, {one.used} ({one.source}).")  # fmt: skip
    turns = turns_of(one.place.recorded.trajectory)[edit.turn - 1 :]
    versions = sorted({version for said, _ in turns for version, _ in said.version_runs})
    if versions != [one.wanted]:
        yield f"Weights {', '.join(map(str, versions))} sampled these turns; one version replays."
    if one.num_asked:
        yield f"Calls that were never recorded, and so asked of the tools now: {one.num_asked}."
    is_same = likeness.differs_at is None and likeness.largest == 0
    if is_same or edit.changes:
        return
    if not config.trainer.deterministic:
        yield ("The run sampled several dialogues at once (trainer.deterministic=false): what is "
               "computed together, or cached, changes last bits.")  # fmt: skip
    if (dtype := rollout_dtype(config)) != "float32":
        yield f"The engine computes in {dtype}, whose last bits are large."
    if config.actor_rollout_ref.model.has_adapter:
        yield "The adapter is merged here, where the run's engine may add it to each answer."
    yield "Another machine, device, number of threads or library changes last bits, too."


def in_words(found: Mapping[str, Any]) -> str:
    lines = [f"{found['trajectory']}: {found['verdict']}", *found["notes"]]
    for name in ("score", "advantage"):
        if name in found:
            lines.append(f"{name}: {found[name]['recorded']} → {found[name]['replayed']}")
    for name, value in found.get("gradient", {}).items():
        lines.append(f"gradient, {name.replace('_', ' ')}: {value}")
    if not found["identical"]:
        segments = found["row"]["segments"]
        lines += [f"[{s['origin']}] {s['text']}" for s in segments if s["origin"] != "prompt"]
    return "\n  ".join(lines) + "\n"
