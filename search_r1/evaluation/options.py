"""Options of `search-r1 evaluate`: one dataclass per command."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from search_r1.evaluation.measures import MEASURES
from search_r1.inference.agent_options import COMMON, AgentOptions
from search_r1.options import Bounds, Seed
from verl.errors import ConfigError, explain

WRONG: Literal["wrong"] = "wrong"
READ: Literal["read"] = "read"
"""How a reply without an answer in tags is scored."""


@dataclass(frozen=True, kw_only=True)
class BootstrapOptions:
    """Options of the bootstrap over questions."""

    num_resamples: Annotated[int, Bounds(100, 10**6)] = 2000
    """resamples of the bootstrap"""
    seed: Seed = 0
    """seed of the bootstrap"""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(AgentOptions):
    """Run and score every row (the word `run` is optional); lengths are in tokens."""

    COMMON = ("data", "out", "method", "num_rows", "n", "judge_url", "judge_model", *COMMON)

    data: tuple[str, ...] = ()
    """parquet or jsonl files of questions"""
    out: str = ""
    """folder of this evaluation; an interrupted evaluation is resumed"""
    method: Literal["agent", "direct", "cot", "rag", "ircot"] = "agent"
    """agent searches; direct, cot, rag and ircot are baselines"""
    untagged: Literal["wrong", "read"] = WRONG
    """a reply without <answer> counts as wrong, or its text is read as the answer"""
    normalize: Literal["squad", "unicode"] | None = None
    """rule by which answers are compared, as in `reward_model.normalize`; default: the model's own
    setting"""
    num_rows: Annotated[int, Bounds(1)] | None = None
    """number of rows to evaluate, chosen at random, the same with every --seed; default: all"""
    n: Annotated[int, Bounds(1, 10_000)] = 1
    """samples per question"""
    pass_k: tuple[Annotated[int, Bounds(1)], ...] = ()
    """report pass@k for these k, at most n"""
    seed: Seed = 0
    """seed of sampling and of the bootstrap"""
    judge_url: str | None = None
    """OpenAI-compatible server that also judges the answers, as http://HOST:PORT/v1"""
    judge_model: str | None = None
    """the judge's model name on that server"""
    judge_api_key_env: str | None = None
    """environment variable with the judge's key"""
    judge_verdict: Literal["yes_no", "score"] = "yes_no"
    """form of the judge's reply"""
    judge_body: str | None = None
    """JSON object of fields that replace those of the judge's requests; null removes a field"""
    prompt_key: str = "prompt"
    """column of the prompt"""
    num_resamples: Annotated[int, Bounds(100, 10**6)] = 2000
    """resamples of the bootstrap"""

    def conflicts(self) -> Iterator[str]:
        """Yield problems of the agent's options, samples, files and judge."""
        yield from super().conflicts()
        fixes = {"model": "name a folder, hub name or checkpoint", "data": "name question files",
                 "out": "name the folder for the evaluation"}  # fmt: skip
        for name, fix in fixes.items():
            if not getattr(self, name):
                yield explain(f"--{name}", "nothing", f"a value for --{name}", fix)
        if self.n > 1 and self.temperature == 0:
            got, fix = f"{self.n} with temperature 0", "--temperature 1.0, or --n 1"
            yield explain("--n", got, "samples that differ", fix)
        if max(self.pass_k, default=0) > self.n:
            yield explain("--pass-k", self.pass_k, f"1 to n={self.n}", f"--n {max(self.pass_k)}")
        if (self.judge_model is None) != (self.judge_url is None):
            fix = "give both --judge-url and --judge-model"
            yield explain("--judge-model", self.judge_model, "url and model, or neither", fix)
        if self.judge_body is not None and _json_object(self.judge_body) is None:
            fix = """--judge-body '{"max_completion_tokens": 2000, "max_tokens": null}'"""
            yield explain("--judge-body", self.judge_body, "a JSON object", fix)
        if self.judge_api_key_env is not None and self.judge_url is None:
            fix = "leave it out, or give --judge-url and --judge-model"
            expected = "the judge that the key belongs to"
            yield explain("--judge-api-key-env", "no --judge-url", expected, fix)


def _json_object(text: str) -> dict[str, Any] | None:
    """Parse a JSON object; None if the text is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True, kw_only=True)
class ReportOptions(BootstrapOptions):
    """Write the report of a finished evaluation again."""

    folder: tyro.conf.Positional[Path]
    """the --out of an evaluation"""
    pass_k: tuple[Annotated[int, Bounds(1)], ...] = ()
    """report pass@k for these k"""


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions(BootstrapOptions):
    """Options of comparisons of evaluations."""

    measure: str = "em"
    """the measure to compare: a name in metrics.json, except pass@k"""
    mixed: bool = False
    """allow different data or corpora side by side"""
    by: str | None = None
    """column of --by-data whose values group the questions instead of their sets, as `evidence`"""
    by_data: tuple[Path, ...] = ()
    """the question files that were evaluated, with that column (`search-r1 data audit`)"""

    def __post_init__(self) -> None:
        if (self.by is None) != (not self.by_data):
            got, fix = f"--by {self.by} with {len(self.by_data)} files", "give both, or none"
            raise ConfigError(explain("--by", got, "a column and --by-data", fix))
        names = [measure.name for measure in MEASURES]
        if self.measure not in names:
            expected = f"one of {', '.join(names)}"
            raise ConfigError(explain("--measure", self.measure, expected, "correct it"))


@dataclass(frozen=True, kw_only=True)
class CompareOptions(ComparisonOptions):
    """Test two evaluations, paired by question."""

    first: tyro.conf.Positional[Path]
    """the --out of an evaluation"""
    second: tyro.conf.Positional[Path]
    """the --out of another evaluation"""


@dataclass(frozen=True, kw_only=True)
class TableOptions(ComparisonOptions):
    """Print one table of several evaluations."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """the --out of each evaluation"""
    paper: Literal["3B", "7B"] | None = None
    """put the evaluations' EM beside the paper's, of Qwen2.5 with this size"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.paper and self.measure != "em":
            got, fix = f"--measure {self.measure}", "leave out --measure, or --paper"
            raise ConfigError(explain("--paper", got, "em, which the paper reports", fix))
        if self.paper and self.by:
            fix = "leave out --by, or --paper"
            raise ConfigError(explain("--paper", f"--by {self.by}", "questions by set", fix))
        if not self.folders:
            fix = "give the --out of each evaluation"
            raise ConfigError(explain("table", "no folders", "one or more", fix))
