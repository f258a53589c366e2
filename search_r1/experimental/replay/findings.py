"""The result of a replay, as JSON and as text: comparison with the record, score and gradient.

Advantage and gradient are those of the recorded step with the replayed trajectory in place of the
recorded one. The gradient is that of the policy loss at the weights that sampled the step.
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

from search_r1.experimental.replay.playing import Comparison, Edit, turns_of
from search_r1.experimental.replay.reading import TrajectoryRef
from search_r1.inference.model import model_folder
from verl.batch import TokenBatch
from verl.config import Config
from verl.core_algos.chosen import advantage_estimator, policy_loss
from verl.core_algos.kl import FixedKLController
from verl.core_algos.losses import loss_weights, weighted_sum
from verl.core_algos.policy_losses import PolicyLossInputs
from verl.data.trajectories import RecordedTrajectory, make_row
from verl.rewards.interface import Reward, RewardManager
from verl.trainer.collect import Samples
from verl.trainer.learn import add_advantages, assemble
from verl.training.actor import TargetColumns, loss_mask
from verl.training.devices import resolve_device, rollout_dtype
from verl.training.loading import load_causal_lm
from verl.training.models import LogProbModel, PackedInputs
from verl.types import Origin, Status, Trajectory


@dataclass(frozen=True)
class Gradients:
    """Comparison of two gradients; a cosine with a zero gradient is None."""

    norm_recorded: float
    norm_replayed: float
    norm_of_change: float
    cosine: float | None
    cosine_of_change: float | None
    """Cosine of the change and the recorded gradient."""


def advantage_caveat(config: Config) -> str:
    """Return what the replayed advantage lacks because it is not recorded, or ""."""
    estimator = config.algorithm.adv_estimator
    if advantage_estimator(estimator).needs_critic:
        return f"no advantage: {estimator} needs the critic's values, which are not recorded"
    if config.kl_in_reward:
        return "the advantage is computed from the scores, without the KL in the reward"
    return ""


def training_batch(
    config: Config, step: Sequence[RecordedTrajectory], line: int, trajectory: RecordedTrajectory
) -> TokenBatch:
    """Return the training data of one sequence of a step, with `trajectory` put at its line.

    Its `advantages` and `loss_weights` are computed over the whole step.
    """
    rows = [*step[:line], trajectory, *step[line + 1 :]]
    config = copy.deepcopy(config)
    config.trainer.share_prompts, config.algorithm.kl_ctrl.kl_coef = False, 0.0
    samples = Samples([row.trajectory for row in rows], [row.reward for row in rows])
    batch = assemble(samples, config)
    add_advantages(batch, config, FixedKLController(0.0))
    batch.tokens["loss_weights"] = loss_weights(
        batch.tokens["loss_mask"], batch.offsets, config.actor_rollout_ref.actor.loss_agg_mode,
        float(config.max_policy_tokens),
    )  # fmt: skip
    return batch.select([line])


def mean_advantage(batch: TokenBatch) -> float:
    """Return the mean advantage of the tokens in the loss; NaN if there are none."""
    values = batch.tokens["advantages"][loss_mask(batch)]
    return float(values.mean()) if len(values) else math.nan


def gradients(
    config: Config, folder: Path, recorded: TokenBatch, replayed: TokenBatch
) -> Gradients:
    """Compute both gradients in float32 at the weights in a Hugging Face folder."""
    device = resolve_device(config.trainer.device)
    model = LogProbModel(load_causal_lm(str(folder)))
    model.to(device)
    before, after = (_gradient(config, model, batch, device) for batch in (recorded, replayed))
    change = [b - a for a, b in zip(before, after, strict=True)]
    norms = [math.sqrt(_dot(tensors, tensors)) for tensors in (before, after, change)]
    return Gradients(
        norms[0], norms[1], norms[2],
        _cosine(_dot(before, after), norms[0] * norms[1]),
        _cosine(_dot(before, change), norms[0] * norms[2]),
    )  # fmt: skip


def _gradient(
    config: Config, model: LogProbModel, batch: TokenBatch, device: torch.device
) -> list[Tensor]:
    """Return the gradient of the batch's policy loss for each parameter."""
    actor = config.actor_rollout_ref.actor
    inputs = PackedInputs.of(batch, loss_mask(batch), device)
    columns = TargetColumns(batch, inputs)
    log_probs, _ = model(inputs, config.actor_rollout_ref.rollout.log_prob_temperature)
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    loss_inputs = PolicyLossInputs(
        log_probs, log_probs.detach(), columns["advantages"], columns.sequence_ids,
        actor.clip_ratio, high, actor.clip_ratio_c,
    )  # fmt: skip
    losses, _ = policy_loss(actor.policy_loss)(loss_inputs)
    model.zero_grad(set_to_none=True)
    weighted_sum(losses, columns["loss_weights"]).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def _dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Return the dot product, summed in float64."""
    return sum(float((a.double() * b.double()).sum()) for a, b in zip(first, second, strict=True))


def _cosine(product: float, norms: float) -> float | None:
    return product / norms if norms else None


@dataclass(frozen=True)
class Replay:
    ref: TrajectoryRef
    trajectory: Trajectory
    sampled_version: int
    """Version of the weights that sampled the first replayed turn."""
    used_version: int
    """Version of the weights of the replay: the same, or the nearest that was saved."""
    weights: str
    """Where the used weights are: a checkpoint, or the model that the run started from."""
    num_new_calls: int
    """Calls without a recorded result, which were sent to the tools."""


def replay_report(
    config: Config, replay: Replay, edit: Edit, reward: RewardManager, with_gradient: bool
) -> dict[str, Any]:
    """Return the result of a replay as JSON; `row` is the trajectory as a run records it."""
    ref, recorded, trajectory = replay.ref, replay.ref.recorded, replay.trajectory
    comparison = Comparison.of(recorded.trajectory, trajectory, edit.turn)
    has_failed = trajectory.status is Status.FAILED
    new_reward = Reward(math.nan) if has_failed else reward([trajectory])[0]
    replayed = RecordedTrajectory(trajectory, new_reward)
    notes = list(replay_notes(config, replay, edit, comparison))
    if caveat := advantage_caveat(config):
        notes.append(f"{caveat[0].upper()}{caveat[1:]}.")
    effects: dict[str, Any] = {}
    if not has_failed and not advantage_estimator(config.algorithm.adv_estimator).needs_critic:
        batches = [training_batch(config, ref.rows, ref.line, t) for t in (recorded, replayed)]
        effects["advantage"] = _pair(*map(mean_advantage, batches))
        if with_gradient:
            with model_folder(replay.weights, "float32") as folder:
                effects["gradient"] = dataclasses.asdict(gradients(config, folder, *batches))
    return {
        "trajectory": str(ref),
        "turn": edit.turn,
        "edited": edit.changes,
        "verdict": verdict(edit, comparison, trajectory),
        "notes": notes,
        "identical": comparison.is_identical,
        **dataclasses.asdict(comparison),
        "score": _pair(recorded.reward.score, new_reward.score),
        **effects,
        "row": make_row(ref.step, len(ref.rows), replayed)
        | {"score": None if has_failed else new_reward.score},
    }


def _pair(recorded: float, replayed: float) -> dict[str, float | None]:
    pair = {"recorded": recorded, "replayed": replayed}
    return {name: value if math.isfinite(value) else None for name, value in pair.items()}


def verdict(edit: Edit, comparison: Comparison, trajectory: Trajectory) -> str:
    """Say in one sentence how far the replay matches the record."""
    if trajectory.status is Status.FAILED:
        return f"The replay ends where a tool failed: {trajectory.error}"
    where = f" from turn {edit.turn} on" if edit.turn > 1 else ""
    count = comparison.num_tokens
    tokens = f"{count} token{'s' * (count != 1)} of the policy{where}"
    if comparison.differs_at is not None:
        segment, token = comparison.differs_at
        is_policy = [s.origin is Origin.POLICY for s in trajectory.segments[: segment + 1]]
        is_in_turn = len(is_policy) > segment and is_policy[-1]
        position = f"{'' if is_in_turn else 'the response to '}turn {sum(is_policy)}"
        cause = (
            f"With the edited {' and '.join(edit.changes)}" if edit.changes else "Without an edit"
        )
        return (f"{cause} the replay first differs at token {token + 1} of {position}, "
                f"after {tokens}.")  # fmt: skip
    if comparison.largest == 0:
        return f"Bit-identical to the record: all {tokens}, and their log-probs."
    return f"The same tokens: all {tokens}; log-probs differ by up to {comparison.largest:.1e}."


def replay_notes(
    config: Config, replay: Replay, edit: Edit, comparison: Comparison
) -> Iterator[str]:
    """Yield notes on how the replay was made, and on why an unedited one may differ."""
    if replay.used_version != replay.sampled_version:
        yield (f"The run saved no checkpoint of weights {replay.sampled_version} "
               f"(trainer.save_freq=1 saves all): replayed with the nearest, "
               f"{replay.used_version} ({replay.weights}).")  # fmt: skip
    turns = turns_of(replay.ref.recorded.trajectory)[edit.turn - 1 :]
    versions = sorted({turn.weight_version for turn, _ in turns})
    if versions != [replay.sampled_version]:
        yield (f"Weights {', '.join(map(str, versions))} sampled these turns; the replay uses "
               "one version.")  # fmt: skip
    if replay.num_new_calls:
        yield f"Calls without a recorded result, sent to the tools now: {replay.num_new_calls}."
    if comparison.is_identical or edit.changes:
        return
    if not config.trainer.deterministic:
        yield ("The run sampled several dialogues at once (trainer.deterministic=false): batching "
               "and caching change the last bits.")  # fmt: skip
    if (dtype := rollout_dtype(config)) != "float32":
        yield f"The engine computes in {dtype}, so the last bits are large."
    if config.actor_rollout_ref.model.has_adapter:
        yield "The adapter is merged here; the run's engine may have applied it unmerged."
    yield "Another machine, device, number of threads or library version changes the last bits too."


def as_text(report: Mapping[str, Any]) -> str:
    lines = [f"{report['trajectory']}: {report['verdict']}", *report["notes"]]
    for name in ("score", "advantage"):
        if name in report:
            lines.append(f"{name}: {report[name]['recorded']} → {report[name]['replayed']}")
    for name, value in report.get("gradient", {}).items():
        lines.append(f"gradient, {name.replace('_', ' ')}: {value}")
    if not report["identical"]:
        segments = report["row"]["segments"]
        lines += [f"[{s['origin']}] {s['text']}" for s in segments if s["origin"] != "prompt"]
    return "\n  ".join(lines) + "\n"
