"""Compute the worth of documents in recorded trajectories, written to `RUN/credit/step_N.jsonl`."""

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

from search_r1.experimental.credit.command import CreditOptions
from search_r1.experimental.weights import find_weights, nearest_version
from search_r1.inference.agent_options import AgentOptions
from search_r1.inference.model import compute_dtype, model_folder
from search_r1.inference.model_name import at_latest_checkpoint
from search_r1.runs.dialogue import OBSERVATION, Dialogue, find_headings, read_dialogue, tags_of
from search_r1.runs.folder import CREDIT
from search_r1.runs.tokens import pieces
from search_r1.scoring import build_reward_manager
from verl.agent.dialogue import derived_seed
from verl.agent.grammar import Grammar, spans_between
from verl.config import Config
from verl.data.trajectories import (
    RecordedTrajectory,
    fingerprint,
    make_row,
    read_header,
    read_step,
    step_path,
    write_jsonl,
)
from verl.errors import ConfigError, explain
from verl.remote_code import set_trust
from verl.rewards.interface import RewardManager
from verl.rollout.interface import engine_class
from verl.training.devices import device_type
from verl.types import Origin, Sampling, Segment, Status, Trajectory

RANK = re.compile(r"^Doc \d+")


@dataclass(frozen=True)
class CreditedDocument:
    """A document of a dialogue, with all positions at which it occurs."""

    title: str
    text: str
    id: str
    has_answer: bool
    places: tuple[tuple[int, int], ...]
    """Pairs of the search's number and the document's rank in its result, from 0."""


def documents_of(dialogue: Dialogue) -> list[CreditedDocument]:
    """Return each document once, in the order in which the policy read them."""
    documents: dict[tuple[str, str], CreditedDocument] = {}
    for number, search in enumerate(dialogue.searches):
        for rank, doc in enumerate(search.documents):
            known = documents.get((doc.title, doc.text))
            places = (*(known.places if known else ()), (number, rank))
            document = CreditedDocument(doc.title, doc.text, doc.id, doc.has_answer, places)
            documents[doc.title, doc.text] = document
    return list(documents.values())


def remove_document(
    dialogue: Dialogue, document: CreditedDocument, tags: Grammar
) -> dict[int, str]:
    """Return the observations that change if a document is removed, by segment.

    Documents after it move up a rank.
    """
    texts = {
        number: _remove_from_text(segment["text"], document, tags)
        for number, segment in enumerate(dialogue.segments)
        if segment["origin"] == OBSERVATION
    }
    return {n: text for n, text in texts.items() if text != dialogue.segments[n]["text"]}


def _remove_from_text(text: str, document: CreditedDocument, tags: Grammar) -> str:
    parts, last = [], 0
    for start, end in spans_between(text, tags.information):
        parts += [text[last:start], _remove_from_result(text[start:end], document)]
        last = end
    return "".join([*parts, text[last:]])


def _remove_from_result(information: str, document: CreditedDocument) -> str:
    headings = find_headings(information)
    if not headings:
        return "" if information.strip() == document.text else information
    ends = [*(heading.start for heading in headings[1:]), len(information)]
    kept = [
        information[heading.start : end]
        for heading, end in zip(headings, ends, strict=True)
        if (heading.title, information[heading.end : end].strip())
        != (document.title, document.text)
    ]
    ranks = (RANK.match(information[heading.start : heading.end]) for heading in headings)
    moved = (RANK.sub(rank[0], text) for rank, text in zip(ranks, kept, strict=False) if rank)
    return information[: headings[0].start] + "".join(moved)


def answer_tokens(pieces: Sequence[str], tags: Grammar) -> range:
    """Return the range of a turn's tokens that are in its last answer tag, even partly.

    `pieces` are the tokens as texts. The range is empty if there is no closed answer tag.
    """
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
class AnswerScorer:
    """A model that computes log-probs of recorded answers, and samples and scores new ones."""

    engine: Any
    """The `transformers` engine, which also computes log-probs of given tokens."""
    tags: Grammar
    reward: RewardManager | None
    """None if no answers are sampled."""
    sampling: Sampling
    samples: int
    seed: int

    @torch.inference_mode()
    def log_probs(self, context: Sequence[int], ids: Sequence[int]) -> list[float]:
        """Return the log-prob of each of `ids` after the context, at temperature 1."""
        model = self.engine.model
        row = torch.tensor([[*context, *ids]], device=model.device)
        logits = model(row, logits_to_keep=len(ids) + 1).logits[0, :-1].float()
        chosen = logits.log_softmax(-1).gather(1, row[0, -len(ids) :, None])
        return [float(x) for x in chosen[:, 0]]

    def mean_reward(self, before: Trajectory) -> float:
        """Sample answers after a dialogue and return their mean reward.

        The seeds do not depend on the documents in the dialogue.
        """
        assert self.reward is not None
        trajectories = []
        for number in range(self.samples):
            seed = derived_seed(self.seed, before.group, before.sample, number)
            out = asyncio.run(self.engine.generate(before.ids, replace(self.sampling, seed=seed)))
            turn = Segment(Origin.POLICY, out.ids, out.text, out.log_probs)
            trajectories.append(replace(before, segments=[*before.segments, turn]))
        return fmean(reward.score for reward in self.reward(trajectories))


def write_worths(
    options: CreditOptions,
    rollouts: Path,
    steps: Sequence[int],
    raw_config: Mapping[str, Any],
    config: Config | None,
) -> None:
    """Write the worth of the documents in the selected steps. Raises UserError.

    `raw_config` is the run's `config.yaml`, `config` what this release makes of it.
    """
    set_trust(options.trust_remote_code)
    scorer: AnswerScorer | None = None
    loaded = ""
    with contextlib.ExitStack() as stack:
        for step in steps:
            recorded = read_step(rollouts, step)
            weights = options.checkpoint or _choose_weights(options.run, config, recorded)
            if scorer is None or weights != loaded:
                scorer = None  # free the first model before the second is loaded
                stack.close()
                opened = _open_scorer(options, rollouts, weights, tags_of(raw_config), config)
                scorer, loaded = stack.enter_context(opened), weights
            rows = _step_rows(scorer, recorded, step, options.limit, weights)
            out = options.run / CREDIT / step_path("", step).name
            out.parent.mkdir(exist_ok=True)
            write_jsonl(out, rows)
            logger.info("%s, with %s: %s", out, weights, _summary(rows))


def _choose_weights(
    run: Path, config: Config | None, recorded: Sequence[RecordedTrajectory]
) -> str:
    """Return the weights that sampled most answers of the step, or the nearest that were saved."""
    assert config is not None, "--checkpoint is required without a config"
    versions = Counter(row.trajectory.segments[-1].weight_version for row in recorded)
    saved = find_weights(run, config)
    return saved[nearest_version(saved, versions.most_common(1)[0][0])]


@contextlib.contextmanager
def _open_scorer(
    options: CreditOptions, rollouts: Path, weights: str, tags: Grammar, config: Config | None
) -> Iterator[AnswerScorer]:
    """Load the weights, with the run's options or, without a `config`, the default ones."""
    config = config or Config()
    agent = AgentOptions(model=weights, device=options.device, dtype=options.dtype)
    agent, dtype = at_latest_checkpoint(agent), compute_dtype(agent)
    sampling = Sampling(config.data.max_response_length, options.temperature,
                        config.actor_rollout_ref.rollout.top_p, tags.stop)  # fmt: skip
    reward = build_reward_manager(config) if options.samples else None
    with model_folder(agent.model, dtype) as folder:
        build: Any = engine_class("transformers")
        engine = build(str(folder), device_type(options.device), dtype)
        asyncio.run(engine.start())
        if fingerprint(engine.tokenizer) != read_header(rollouts):
            got = f"{weights}, with another tokenizer than {rollouts}"
            fix = "name weights of that run"
            raise ConfigError(explain("--checkpoint", got, "the same tokenizer", fix))
        yield AnswerScorer(engine, tags, reward, sampling, options.samples, options.seed)


def _step_rows(
    scorer: AnswerScorer,
    recorded: Sequence[RecordedTrajectory],
    step: int,
    limit: int | None,
    model: str,
) -> list[dict[str, Any]]:
    """Return the output rows of a step, for its trajectories with documents and an answer."""
    chosen = []
    for line, row in enumerate(recorded):
        dialogue = read_dialogue(make_row(step, len(recorded), row), scorer.tags)
        if row.trajectory.status is Status.ANSWERED and documents_of(dialogue):
            chosen.append((line, row.trajectory, row.reward.score, dialogue))
    rows = []
    for line, trajectory, score, dialogue in tqdm(chosen[:limit], desc=f"step {step}"):
        facts = {
            "step": step, "line": line, "uid": trajectory.prompt.uid, "group": trajectory.group,
            "sample": trajectory.sample, "answer": dialogue.answer, "score": score,
            "model": model,
        }  # fmt: skip
        rows += [facts | worth for worth in document_worths(scorer, trajectory, dialogue)]
    return rows


def document_worths(
    scorer: AnswerScorer, trajectory: Trajectory, dialogue: Dialogue
) -> Iterator[dict[str, Any]]:
    """Yield the worth of each document to the last turn, and to the answer in it.

    The worth is the increase of the recorded tokens' log-prob, in nats, due to the document. All
    text of the policy stays the same.
    """
    *before, last = trajectory.segments
    inside = answer_tokens(pieces(scorer.engine.tokenizer, last.ids), scorer.tags)

    def score(segments: Sequence[Segment]) -> dict[str, float]:
        context = [i for segment in segments for i in segment.ids]
        log_probs = scorer.log_probs(context, last.ids)
        values = {"turn": sum(log_probs), "answer": sum(log_probs[i] for i in inside)}
        if scorer.samples:
            values["reward"] = scorer.mean_reward(replace(trajectory, segments=list(segments)))
        return values

    def encoded(text: str) -> tuple[int, ...]:
        return tuple(scorer.engine.tokenizer.encode(text, add_special_tokens=False))

    complete = score(before)
    recorded = {"turn": sum(last.log_probs), "answer": sum(last.log_probs[i] for i in inside)}
    for document in documents_of(dialogue):
        changed = remove_document(dialogue, document, scorer.tags)
        reduced = score([
            Segment(segment.origin, encoded(changed[n]), changed[n]) if n in changed else segment
            for n, segment in enumerate(before)
        ])  # fmt: skip
        yield {
            **{name: value for name, value in asdict(document).items() if name != "text"},
            "worth": {name: value - reduced[name] for name, value in complete.items()},
            "with": complete, "without": reduced,
            "recorded": {n: x if math.isfinite(x) else None for n, x in recorded.items()},
        }  # fmt: skip


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "no trajectory that searched and answered"
    means = []
    for has_answer, words in ((True, "with an accepted answer"), (False, "without one")):
        worth = [row["worth"] for row in rows if row["has_answer"] is has_answer]
        if worth:
            figures = [f"{fmean(values['answer'] for values in worth):+.3f} nats"]
            if "reward" in worth[0]:
                figures.append(f"{fmean(values['reward'] for values in worth):+.3f} of reward")
            means.append(f"{' and '.join(figures)} for each of {len(worth)} documents {words}")
    gaps = [abs(r["with"]["turn"] - r["recorded"]["turn"]) for r in rows if r["recorded"]["turn"]]
    gap = f"; log-probs of turns differ from the record by {fmean(gaps):.3f} nats" if gaps else ""
    return f"mean worth to the answer: {', '.join(means)}{gap}"
