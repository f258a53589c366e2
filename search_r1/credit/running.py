"""From a run's record to a line for each trajectory and document: `RUN/credit/step_N.jsonl`."""

import asyncio
import contextlib
import itertools
import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

from search_r1.credit.command import CreditOptions
from search_r1.inference.model import at_latest_checkpoint, compute_dtype, model_folder
from search_r1.inference.options import AgentOptions
from search_r1.plain import configure_logging
from search_r1.replay.running import nearest, read_run, weights_of
from search_r1.scoring import build_reward_manager
from search_r1.view.dialogue import DOCUMENT, OBSERVATION, Dialogue, read_dialogue, tags_of
from search_r1.view.run import CREDIT, find_rollouts, read_config
from search_r1.view.tokens import pieces
from verl.agent.dialogue import derived_seed
from verl.agent.grammar import Grammar
from verl.config import Config
from verl.data.trajectories import (
    HEADER,
    RecordedTrajectory,
    fingerprint,
    make_row,
    read_header,
    read_step,
    recorded_steps,
    step_path,
    write_jsonl,
)
from verl.errors import ConfigError, DataError, explain
from verl.remote_code import set_trust
from verl.rewards.interface import RewardManager
from verl.rollout.transformers_engine import TransformersEngine
from verl.training.devices import device_type
from verl.types import Origin, Sampling, Segment, Status, Trajectory

RANK = re.compile(r"^Doc \d+")


@dataclass(frozen=True)
class Document:
    """A document of a dialogue, wherever it stands."""

    title: str
    text: str
    id: str
    has_answer: bool
    places: tuple[tuple[int, int], ...]
    """Numbers of the search and of the document among those it brought, from 0."""


def documents_of(dialogue: Dialogue) -> list[Document]:
    """Each document once, in the order in which they were read."""
    found: dict[tuple[str, str], Document] = {}
    for number, search in enumerate(dialogue.searches):
        for rank, one in enumerate(search.documents):
            known = found.get((one.title, one.text))
            places = (*(known.places if known else ()), (number, rank))
            found[one.title, one.text] = Document(
                one.title, one.text, one.id, one.has_answer, places
            )
    return list(found.values())


def without(dialogue: Dialogue, document: Document, tags: Grammar) -> dict[int, str]:
    """Observations as they would be without a document, by segment; others move up a rank."""
    opening, closing = map(re.escape, (tags.information.opening, tags.information.closing))
    between = re.compile(f"(?<={opening})(.*?)(?={closing})", re.DOTALL)
    texts = {
        number: between.sub(lambda found: _kept(found[1], document), one["text"])
        for number, one in enumerate(dialogue.segments)
        if one["origin"] == OBSERVATION
    }
    return {n: text for n, text in texts.items() if text != dialogue.segments[n]["text"]}


def _kept(information: str, document: Document) -> str:
    starts = list(DOCUMENT.finditer(information))
    if not starts:
        return "" if information.strip() == document.text else information
    ends = [*(one.start() for one in starts[1:]), len(information)]
    kept = [
        information[one.start() : end]
        for one, end in zip(starts, ends, strict=True)
        if (one["title"], information[one.end() : end].strip()) != (document.title, document.text)
    ]
    ranks = (RANK.match(one[0]) for one in starts)
    moved = (RANK.sub(rank[0], one) for rank, one in zip(ranks, kept, strict=False) if rank)
    return information[: starts[0].start()] + "".join(moved)


def answer_tokens(pieces: Sequence[str], tags: Grammar) -> range:
    """Which tokens of a turn, given by their texts, spell what stands in its last answer tag; a
    token that reaches beyond the tag counts. Empty where there is none."""
    text = "".join(pieces)
    start = text.rfind(tags.answer.opening)
    end = text.find(tags.answer.closing, start)
    if start < 0 or end < 0:
        return range(0)
    start += len(tags.answer.opening)
    ends = list(itertools.accumulate(map(len, pieces)))
    inside = [
        number
        for number, (piece, last) in enumerate(zip(pieces, ends, strict=True))
        if last > start and last - len(piece) < end
    ]
    return range(inside[0], inside[-1] + 1) if inside else range(0)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judge:
    """The weights that look at an answer again, and what scores those that they sample."""

    engine: TransformersEngine
    tags: Grammar
    reward: RewardManager | None
    """None where nothing is sampled."""
    sampling: Sampling
    samples: int
    seed: int

    @torch.inference_mode()
    def log_probs(self, context: Sequence[int], ids: Sequence[int]) -> list[float]:
        """The log-prob of each of `ids` behind the context, at temperature 1."""
        model = self.engine.model
        row = torch.tensor([[*context, *ids]], device=model.device)
        logits = model(row, logits_to_keep=len(ids) + 1).logits[0, :-1].float()
        chosen = logits.log_softmax(-1).gather(1, row[0, -len(ids) :, None])
        return [float(x) for x in chosen[:, 0]]

    def mean_reward(self, before: Trajectory) -> float:
        """Of answers that are sampled behind a dialogue; the same seeds whatever it is."""
        assert self.reward is not None
        ended = []
        for number in range(self.samples):
            seed = derived_seed(self.seed, before.group, before.sample, number)
            said = asyncio.run(self.engine.generate(before.ids, replace(self.sampling, seed=seed)))
            turn = Segment(Origin.POLICY, said.ids, said.text, said.log_probs)
            ended.append(replace(before, segments=[*before.segments, turn]))
        return fmean(one.score for one in self.reward(ended))


def start(options: CreditOptions) -> int:
    """Write what the documents of the record were worth; returns the exit code."""
    configure_logging(logging.INFO, "%(message)s")
    found = read_config(options.run)
    rollouts = options.rollouts or find_rollouts(options.run, found)
    if rollouts is None or not (rollouts / HEADER).is_file():
        expected = f"a run that kept its trajectories, or their folder with {HEADER}"
        fix = "name it, or --rollouts, or train with trainer.rollout_data_dir=FOLDER"
        raise ConfigError(explain("RUN", options.run, expected, fix))
    known = recorded_steps(rollouts)
    steps = options.steps or known[-1:]
    if not steps or not set(steps) <= set(known):
        got = ", ".join(map(str, sorted(set(steps) - set(known)))) or "none"
        span = f"steps that {rollouts} has: {known[0]} to {known[-1]}" if known else "a record"
        raise DataError(explain("--steps", got, span, "name one of those"))
    config = read_run(options.run) if found else None
    if config is None and not options.checkpoint:
        expected = f"weights, as {options.run} has no config.yaml"
        raise ConfigError(explain("--checkpoint", "none", expected, "--checkpoint FOLDER"))
    set_trust(options.trust_remote_code)
    judge: Judge | None = None
    loaded = ""
    with contextlib.ExitStack() as stack:
        for step in steps:
            recorded = read_step(rollouts, step)
            weights = options.checkpoint or _weights_of(options.run, config, recorded)
            if judge is None or weights != loaded:
                judge = None  # the memory need not hold two models
                stack.close()
                judging = _judging(options, rollouts, weights, tags_of(found), config)
                judge, loaded = stack.enter_context(judging), weights
            rows = _step(judge, recorded, step, options.limit, weights)
            out = options.run / CREDIT / step_path("", step).name
            out.parent.mkdir(exist_ok=True)
            write_jsonl(out, rows)
            logger.info("%s, by %s: %s", out, weights, _summary(rows))
    return 0


def _weights_of(run: Path, config: Config | None, recorded: Sequence[RecordedTrajectory]) -> str:
    """Those that sampled most of the step, or what the run has kept next to them."""
    assert config is not None, "else --checkpoint is wanted"
    wanted = Counter(one.trajectory.segments[-1].weight_version for one in recorded)
    kept = weights_of(run, config)
    return kept[nearest(kept, wanted.most_common(1)[0][0])]


@contextlib.contextmanager
def _judging(
    options: CreditOptions, rollouts: Path, weights: str, tags: Grammar, config: Config | None
) -> Iterator[Judge]:
    """The judge with these weights, under the run's own options, or else the defaults."""
    config = config or Config()
    wanted = AgentOptions(model=weights, device=options.device, dtype=options.dtype)
    wanted, dtype = at_latest_checkpoint(wanted), compute_dtype(wanted)
    sampling = Sampling(config.data.max_response_length, options.temperature,
                        config.actor_rollout_ref.rollout.top_p, tags.stop)  # fmt: skip
    reward = build_reward_manager(config) if options.samples else None
    with model_folder(wanted.model, dtype) as folder:
        engine = TransformersEngine(str(folder), device_type(options.device), dtype)
        asyncio.run(engine.start())
        if fingerprint(engine.tokenizer) != read_header(rollouts):
            got = f"{weights}, with another tokenizer than {rollouts}"
            fix = "--checkpoint with weights of that run"
            raise ConfigError(explain("--checkpoint", got, "its ids", fix))
        yield Judge(engine, tags, reward, sampling, options.samples, options.seed)


def _step(
    judge: Judge, recorded: Sequence[RecordedTrajectory], step: int, limit: int | None, model: str
) -> list[dict[str, Any]]:
    """The lines of a step's trajectories: those that searched, and end with an answer."""
    read = (read_dialogue(make_row(step, len(recorded), one), judge.tags) for one in recorded)
    chosen = [
        (line, one.trajectory, one.reward.score, dialogue)
        for line, (one, dialogue) in enumerate(zip(recorded, read, strict=True))
        if one.trajectory.status is Status.ANSWERED and documents_of(dialogue)
    ]
    rows = []
    for line, trajectory, score, dialogue in tqdm(chosen[:limit], desc=f"step {step}"):
        facts = {
            "step": step, "line": line, "uid": trajectory.prompt.uid, "group": trajectory.group,
            "sample": trajectory.sample, "answer": dialogue.answer, "score": score,
            "model": model,
        }  # fmt: skip
        rows += [facts | one for one in credit(judge, trajectory, dialogue)]
    return rows


def credit(judge: Judge, trajectory: Trajectory, dialogue: Dialogue) -> Iterator[dict[str, Any]]:
    """What each document was worth to the answer turn: to all of it, and to the answer alone.

    In nats: by how much the recorded tokens are more likely with the document than without it. What
    the policy said in between stays as it was.
    """
    *before, last = trajectory.segments
    inside = answer_tokens(pieces(judge.engine.tokenizer, last.ids), judge.tags)

    def looked(segments: Sequence[Segment]) -> dict[str, float]:
        context = [i for segment in segments for i in segment.ids]
        found = judge.log_probs(context, last.ids)
        sums = {"turn": sum(found), "answer": sum(found[i] for i in inside)}
        if judge.samples:
            sums["reward"] = judge.mean_reward(replace(trajectory, segments=list(segments)))
        return sums

    def encoded(text: str) -> tuple[int, ...]:
        return tuple(judge.engine.tokenizer.encode(text, add_special_tokens=False))

    whole = looked(before)
    told = {"turn": sum(last.log_probs), "answer": sum(last.log_probs[i] for i in inside)}
    for document in documents_of(dialogue):
        changed = without(dialogue, document, judge.tags)
        part = looked([
            Segment(segment.origin, encoded(changed[n]), changed[n]) if n in changed else segment
            for n, segment in enumerate(before)
        ])  # fmt: skip
        yield {
            **{name: value for name, value in asdict(document).items() if name != "text"},
            "worth": {name: value - part[name] for name, value in whole.items()},
            "with": whole, "without": part,
            "recorded": {n: x if math.isfinite(x) else None for n, x in told.items()},
        }  # fmt: skip


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "no trajectory that searched and answered"
    means = []
    for has_answer, words in ((True, "with an accepted answer"), (False, "without one")):
        worth = [row["worth"] for row in rows if row["has_answer"] is has_answer]
        if worth:
            figures = [f"{fmean(one['answer'] for one in worth):+.3f} nats"]
            if "reward" in worth[0]:
                figures.append(f"{fmean(one['reward'] for one in worth):+.3f} of reward")
            means.append(f"{' and '.join(figures)} for each of {len(worth)} documents {words}")
    off = [abs(r["with"]["turn"] - r["recorded"]["turn"]) for r in rows if r["recorded"]["turn"]]
    apart = f"; {fmean(off):.3f} nats from what the engine recorded" if off else ""
    return f"worth to the answer {', '.join(means)}{apart}"
