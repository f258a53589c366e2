"""The Python API for trained agents: answering questions, evaluations, options."""

import asyncio
import threading
from pathlib import Path

import pandas as pd
import pytest

import search_r1
from search_r1 import evaluate, load_agent
from search_r1.asking import typed_options
from search_r1.evaluation.options import EvaluationOptions
from search_r1.inference.agent_options import InferenceOptions
from search_r1.inference.dialogue import DialogueListener
from search_r1.retrieval.schema import Document
from tests.bad_models import whole_model
from verl.errors import ConfigError, ToolError
from verl.types import Status

SHORT = {"device": "cpu", "dtype": "float32", "max_response_length": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose folder has dialogue settings."""
    folder = whole_model(tmp_path_factory.mktemp("model"))
    (folder / "search_r1.json").write_text('{"template": "short", "max_turns": 1, "topk": 2}')
    return folder


def find(query: str) -> list[Document]:
    """Always return the same document."""
    return [Document.from_title("1", "Oslo", "A city.")]


class TextRecorder(DialogueListener):
    """Records the policy's text."""

    def __init__(self) -> None:
        self.text = ""

    def said(self, text: str) -> None:
        self.text += text


def test_an_agent_answers_also_within_a_running_loop(model: Path) -> None:
    """An agent works inside a running event loop, and its thread ends when it is closed."""
    num_threads, recorder = threading.active_count(), TextRecorder()

    async def notebook() -> None:
        with load_agent(model, retriever=find, max_turns=0, **SHORT) as agent:
            reply = agent.ask("Where?", recorder)
            assert reply.question == "Where?" and reply.status is not Status.FAILED
            assert recorder.text and reply.turns == [recorder.text]
            assert [r.turns for r in agent.ask_all(["Where?", "Where?"])] == [reply.turns] * 2
            assert agent("Where?").to_json() == reply.to_json()
            with pytest.raises(ConfigError.__base__, match="shorten it"):
                agent.ask("why " * 4000)
        agent.close()

    asyncio.run(notebook())
    assert threading.active_count() <= num_threads + 1  # the thread pool of the loop above


def test_an_error_ends_all_dialogues(model: Path) -> None:
    """After an error in `ask_all` no other dialogue keeps running."""

    async def count_tasks() -> int:
        return len(asyncio.all_tasks())

    with load_agent(model, retriever=find, max_turns=0, **SHORT) as agent:
        before = agent._loop.run(count_tasks())
        with pytest.raises(ConfigError.__base__, match="shorten it"):
            agent.ask_all(["why " * 4000, "Where?"])
        assert agent._loop.run(count_tasks()) == before


def test_the_retriever_is_reached_first() -> None:
    """An unavailable retriever is reported before the missing model."""
    with pytest.raises(ToolError, match=r"retrieval_launch\.sh"):
        load_agent("no/such", retriever="http://127.0.0.1:9")


def test_an_evaluation_gives_scores_and_rows(model: Path, tmp_path: Path) -> None:
    """The result has the folder's scores and rows; repeating the evaluation runs nothing."""
    rows = [
        {"data_source": "nq", "prompt": [{"role": "user", "content": f"Question: {i}?"}],
         "reward_model": {"ground_truth": {"target": ["a"]}}}
        for i in range(2)
    ]  # fmt: skip
    pd.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    options = {"engine": "transformers", "max_turns": 0, "num_resamples": 100, **SHORT}
    kept = evaluate(model, tmp_path / "rows.parquet", out=tmp_path / "out", retriever=find,
                    **options)  # fmt: skip
    assert {row.uid for row in kept.rows} == {"rows.parquet#0", "rows.parquet#1"}
    assert kept.scores["all rows"]["em"] == 0.0 and kept.intervals["nq"]["em"] == (0.0, 0.0)
    assert kept.folder == tmp_path / "out" and (kept.folder / "report.md").is_file()
    again = evaluate(model, [tmp_path / "rows.parquet"], out=kept.folder, retriever=find, **options)
    assert again == kept  # nothing was played again
    assert evaluate is search_r1.evaluate


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"topk": "many"}, "topk: got 'many'"),
        ({"top_k": 3}, "top_k: got 3, expected one of .*did you mean top_p|topk"),
        ({"topk": 0}, "^topk: got 0, expected from 1 to 10000"),
        ({"engine": "vlm"}, "engine: got 'vlm'"),
        ({"served_model": "m"}, "^served_model: got no endpoint"),
    ],
)
def test_options_are_told_by_their_keywords(values: dict[str, object], message: str) -> None:
    """Errors are one line with the keyword, without the dashes of the command line."""
    with pytest.raises(ConfigError, match=message) as error:
        typed_options(InferenceOptions, {"model": "m", **values})
    assert "--" not in str(error.value) and "\n" not in str(error.value)


def test_keywords_are_the_flags() -> None:
    """Keywords give the same options as the dataclass."""
    values = {"model": "m", "data": ["a.parquet"], "out": "o", "pass_k": (1,), "tools": ["search"]}
    options = typed_options(EvaluationOptions, values)
    assert options == EvaluationOptions(
        model="m", data=("a.parquet",), out="o", pass_k=(1,), tools=("search",)
    )
