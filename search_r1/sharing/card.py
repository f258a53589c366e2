"""The model card: what a run's folder and evaluations tell of the model, and nothing else."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from search_r1.evaluation.summary import LEVEL
from search_r1.plain import markdown_table
from search_r1.sharing.facts import RunFacts
from search_r1.sharing.push import PushOptions
from verl.config.known import flatten
from verl.data.rows import is_on_hub

CURVE_COLUMNS = ("val/em", "val/score", "val/env/searches")
TRAINED_WITH = (
    "algorithm.adv_estimator", "actor_rollout_ref.actor.optim.lr", "data.train_batch_size",
    "actor_rollout_ref.rollout.n_agent", "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.model.lora_rank", "actor_rollout_ref.actor.use_kl_loss", "reward_model.name",
    "data.max_prompt_length", "data.max_response_length", "data.max_obs_length",
    "actor_rollout_ref.rollout.max_staleness", "trainer.seed",
)  # fmt: skip
"""Options that a reader of a card looks for."""
MEANING = {
    "data": "training questions", "validation": "validation questions",
    "model": "weights before training", "corpus": "corpus of the retriever",
    "index": "index of the retriever", "tokenizer": "tokenizer", "chat_template": "chat template",
}  # fmt: skip
"""What a run's fingerprints are of; others have the names that their tools gave."""
RETRIEVER_FACTS = ("retriever", "num_documents", "fingerprint")
"""Of what a server said of itself; the other facts may hold paths."""
METRIC_TYPES = {"em": "exact_match"}
TEXT = """---
{{ card_data }}
---

# {{ name }}

"""


def base_of(options: PushOptions, facts: RunFacts) -> str | None:
    """Return the hub name of the model that was trained, if one is known."""
    if options.base_model:
        return options.base_model
    path = str(facts.config["actor_rollout_ref"]["model"]["path"])
    if Path(path).exists():
        return None
    try:
        return path if isinstance(try_to_load_from_cache(path, "config.json"), str) else None
    except HFValidationError:  # a path, whose folder is elsewhere by now
        return None


def write_card(
    options: PushOptions, facts: RunFacts, settings: Mapping[str, Any], out: Path
) -> None:
    """Write README.md into the folder of the model."""
    name = (options.to or str(out.absolute())).rpartition("/")[2]
    parts = [_summary(options, facts), _use(options, settings), _results(facts), _curve(facts),
             _training(facts, settings), _identities(facts)]  # fmt: skip
    card = ModelCard.from_template(_metadata(options, facts, name), template_str=TEXT, name=name)
    card.text = f"{card.text.strip()}\n\n" + "\n\n".join(part for part in parts if part) + "\n"
    card.save(out / "README.md")


def _metadata(options: PushOptions, facts: RunFacts, name: str) -> ModelCardData:
    files = _files(facts.config, "train_files")
    sets = sorted({file.partition(":")[0].partition("@")[0] for file in files if is_on_hub(file)})
    return ModelCardData(
        base_model=base_of(options, facts),
        datasets=sets or None,
        eval_results=_eval_results(facts) or None,
        library_name="peft" if options.adapter else "transformers",
        license=options.license,
        model_name=name,
        pipeline_tag="text-generation",
        tags=["search-r1", "reinforcement-learning", facts.config["algorithm"]["adv_estimator"]],
    )


def _files(config: Mapping[str, Any], option: str) -> list[str]:
    files = config["data"][option]
    return [files] if isinstance(files, str) else list(files or [])


def _eval_results(facts: RunFacts) -> list[EvalResult]:
    """Return the last validation by set, then the evaluations by set."""
    results = [
        _result(s.data_source, s.measure, s.value, f"validation at step {facts.step}")
        for s in facts.scores
    ]
    for manifest, metrics in facts.evaluations:
        for where in metrics["num_questions"]:
            estimate = metrics["estimates"][where]["em"]
            if estimate["value"] is not None:
                note = f"evaluation, retriever {manifest['retriever']['retriever']}"
                results.append(_result(where, "em", estimate["value"], note))
    return results


def _result(where: str, measure: str, value: float, note: str) -> EvalResult:
    return EvalResult(
        task_type="question-answering", dataset_type=where, dataset_name=where,
        metric_type=METRIC_TYPES.get(measure, measure), metric_value=round(value, 4),
        metric_name=f"{measure}, {note}",
    )  # fmt: skip


def _summary(options: PushOptions, facts: RunFacts) -> str:
    algorithm = str(facts.config["algorithm"]["adv_estimator"]).upper()
    kind = "LoRA adapter of a" if options.adapter else "A"
    base = base_of(options, facts)
    of = f" It began from [{base}](https://huggingface.co/{base})." if base else ""
    return (
        f"{kind} language model that was trained with {algorithm} by Search-R1 to call tools "
        f"before it answers; these are the weights after step {facts.step}.{of}"
    )


def _use(options: PushOptions, settings: Mapping[str, Any]) -> str:
    name = options.to or "FOLDER"
    lines = [f"search-r1 infer --model {name} --retriever-url http://HOST:PORT/retrieve QUESTION"]
    if options.adapter:
        folder = name.rpartition("/")[2]
        fetch = [f"hf download {name} --local-dir {folder}"] if options.to else []
        lines = [*fetch, f"search-r1 infer --model BASE --adapter {folder} QUESTION"]
    commands = "\n".join(lines)
    return (
        f"## Use\n\n```bash\n{commands}\n```\n\nThe dialogue that it was trained on is in "
        f"`search_r1.json`: `{json.dumps(settings, ensure_ascii=False)}`. Other programs "
        "have to write the same prompt and answer its calls in the same form."
    )


def _percent(value: float | None, bounds: Any) -> str:
    if value is None:
        return "–"
    low, high = (bounds["low"], bounds["high"]) if isinstance(bounds, dict) else (
        (bounds.low, bounds.high) if bounds else (None, None)
    )  # fmt: skip
    return f"{value:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low is not None else "")


def _results(facts: RunFacts) -> str:
    """Return the tables of validation and evaluations, with their intervals."""
    parts = []
    if facts.scores:
        decoding = facts.config["actor_rollout_ref"]["rollout"]["val_kwargs"]["temperature"]
        rows = [[s.data_source, s.measure, _percent(s.value, s.interval), str(s.num_questions)]
                for s in facts.scores]  # fmt: skip
        table = markdown_table(
            ["set", "measure", f"mean [{LEVEL:.0%} interval]", "questions"], rows
        )
        parts.append(
            f"The run's validation at step {facts.step}, temperature {decoding}:\n\n{table}"
        )
    for manifest, metrics in facts.evaluations:
        rows = [[where, _percent(e["value"], e["interval"]), str(metrics["num_questions"][where])]
                for where in metrics["num_questions"]
                for e in [metrics["estimates"][where]["em"]]]  # fmt: skip
        table = markdown_table(["set", f"EM [{LEVEL:.0%} interval]", "questions"], rows)
        parts.append(f"{_evaluated(manifest)}\n\n{table}")
    note = "Intervals are percentiles of means over resampled questions."
    return "\n\n".join(["## Results", *parts, note]) if parts else ""


def _evaluated(manifest: Mapping[str, Any]) -> str:
    """Say how an evaluation was made: data and retriever by name and hash, decoding."""
    files = ", ".join(f"{Path(name).name} (SHA-256 {digest[:16]})"
                      for name, digest in manifest["data"]["files"].items())  # fmt: skip
    told = manifest["retriever"]
    retriever = ", ".join(f"{name} {told[name]}" for name in RETRIEVER_FACTS if name in told)
    decoding = ", ".join(f"{name} {manifest['decoding'][name]}"
                         for name in ("temperature", "n", "max_turns", "topk"))  # fmt: skip
    return f"Evaluation of {files}; {retriever}; {decoding}:"


def _curve(facts: RunFacts) -> str:
    columns = [name for name in CURVE_COLUMNS if any(name in row for row in facts.curve)]
    if len(facts.curve) < 2:
        return ""
    rows = [[str(row["step"]), *(f"{row[n]:.3f}" if n in row else "–" for n in columns)]
            for row in facts.curve]  # fmt: skip
    return f"## Learning curve\n\n{markdown_table(['step', *columns], rows)}"


def _training(facts: RunFacts, settings: Mapping[str, Any]) -> str:
    """Return the options that a reader looks for, as the run wrote them."""
    values = dict(flatten(facts.config))
    known = [(name, values[name]) for name in TRAINED_WITH if values.get(name) is not None]
    rows = [[f"`{name}`", Path(str(value)).name] for name, value in known]
    files = {"training": _files(facts.config, "train_files"),
             "validation": _files(facts.config, "val_files")}  # fmt: skip
    rows += [[f"{use} files", ", ".join(n if is_on_hub(n) else Path(n).name for n in names)]
             for use, names in files.items() if names]  # fmt: skip
    rows += [[name, str(settings[name])] for name in ("max_turns", "topk") if name in settings]
    return f"## Training\n\n{markdown_table(['option', 'value'], rows)}"


def _identities(facts: RunFacts) -> str:
    """Return the fingerprints by which data, corpus and index can be told from others."""
    rows = [[MEANING.get(name, name), f"`{value}`"] for name, value in facts.fingerprints.items()]
    return f"## Fingerprints\n\n{markdown_table(['of', 'fingerprint'], rows)}" if rows else ""
