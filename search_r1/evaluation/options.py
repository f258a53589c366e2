"""What one evaluation is asked to do beside its agent: every option in one place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from search_r1.evaluation.methods import METHODS
from search_r1.evaluation.untagged import READ, WRONG
from search_r1.inference.options import AgentOptions, Check, option
from verl.config import Config


@dataclass(frozen=True)
class EvaluationOptions(AgentOptions):
    """One evaluation; lengths are in tokens."""

    data: tuple[str, ...] = option((), "parquet or jsonl files of questions", nargs="+")
    out: str = option("", "folder of this evaluation; an interrupted one is gone on with")
    method: str = option("agent", "agent searches; direct, cot and rag are baselines",
                         choices=tuple(METHODS))  # fmt: skip
    untagged: str = option(WRONG, "a reply without <answer> is wrong, or read as it stands",
                           choices=(WRONG, READ))  # fmt: skip
    num_rows: int | None = option(None, "only so many rows, chosen by --seed; default: all", int)
    n: int = option(1, "samples a question", int)
    pass_k: tuple[int, ...] = option((), "report pass@k for these k, at most n", int, nargs="+")
    seed: int = option(0, "of sampling, of --num-rows and of the bootstrap", int)
    judge_url: str | None = option(
        None, "OpenAI-compatible server that judges answers besides, as http://HOST:PORT/v1"
    )
    judge_model: str | None = option(None, "the judge's name there")
    judge_api_key_env: str | None = option(None, "environment variable that holds its key")
    judge_verdict: str = option("yes_no", "what it replies", choices=("yes_no", "score"))
    prompt_key: str = option(Config().data.prompt_key, "column that holds the prompt")
    num_resamples: int = option(2000, "of the bootstrap", int)

    @property
    def searches(self) -> bool:
        """A retriever is asked at all."""
        return METHODS[self.method].needs_documents

    def checks(self) -> Iterator[Check]:
        """Those of the agent, and what concerns samples, files and judges."""
        yield from super().checks()
        yield from (
            ("data", "nothing", bool(self.data), "a file", "name files of questions"),
            ("out", self.out, bool(self.out), "a folder",
             "say where the evaluation is to be written"),
            ("n", self.n, self.n >= 1, "1 or more", "--n 1"),
            ("n", f"{self.n} with temperature 0", self.n == 1 or self.temperature > 0,
             "samples that differ", "--temperature 1.0, or --n 1"),
            ("pass_k", self.pass_k, all(1 <= k <= self.n for k in self.pass_k), f"1 to n={self.n}",
             f"--n {max(self.pass_k, default=1)}"),
            ("num_rows", self.num_rows, self.num_rows is None or self.num_rows >= 1, "1 or more",
             "leave it out for all rows"),
            ("judge_model", self.judge_model,
             (self.judge_model is None) == (self.judge_url is None),
             "url and model, or neither", "give both --judge-url and --judge-model"),
            ("num_resamples", self.num_resamples, self.num_resamples >= 100, "100 or more",
             "--num-resamples 2000"),
        )  # fmt: skip
