"""The five commands in docs/guides/data.md, from a CSV and a folder of texts to a search server."""

import asyncio
from pathlib import Path

import pytest

from search_r1.datasets.command import build
from search_r1.retrieval import index_builder
from search_r1.retrieval.client import RetrievalClient
from search_r1.retrieval.local_server import LocalServer
from verl.config import cli
from verl.data.prompts import load_prompts
from verl.data.validation import main as validate

TEXTS = {
    "animals/badger.md": "# The badger\nBadgers dig setts. A sett may be a century old.",
    "animals/otter.txt": "Otters hold hands while they sleep.",
    "rivers.txt": "The Ilm flows through Weimar. It ends in the Saale.",
}
CSV = """question,answer
What do badgers dig,setts|a sett
What do otters hold while they sleep?,hands
Through which town does the Ilm flow?,Weimar
"Into which river does the Ilm, of Weimar, flow?",the Saale|Saale
"""


class WordTokenizer:
    """Tokenizes by words."""

    chat_template = None

    def apply_chat_template(
        self, conversation: object, *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        raise AssertionError("there is no template")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(range(len(text.split())))


def test_five_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The served index finds each question's passage, and a run accepts the rows."""
    for name, text in TEXTS.items():
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(text)
    (tmp_path / "questions.csv").write_text(CSV)
    own, corpus, index = tmp_path / "own", tmp_path / "own/corpus.jsonl", tmp_path / "own/index"

    share = ["--test_share", "0.25"]
    csv = str(tmp_path / "questions.csv")
    assert build("own_questions", [csv, "--local_dir", str(own), *share]) == 0
    assert build("own_corpus", [str(tmp_path / "texts"), "--out", str(corpus)]) == 0
    built = ["--retrieval_method", "bm25", "--corpus_path", str(corpus), "--save_dir", str(index)]
    index_builder.main(built)
    files = [str(own / "train.parquet"), str(own / "test.parquet")]
    assert validate(["validate", *files]) == 0
    assert "questions 3" in capsys.readouterr().out

    options = [f"data.train_files={files[0]}", f"data.val_files={files[1]}"]
    config = cli.compose([*options, "actor_rollout_ref.model.path=none"])
    prompts = [*load_prompts(config, files[0], None, WordTokenizer())]
    prompts += load_prompts(config, files[1], None, WordTokenizer())
    assert len(prompts) == 4 and len({prompt.uid for prompt in prompts}) == 4
    serve = ["--corpus_path", str(corpus), "--index_path", str(index), "--topk", "1"]
    with LocalServer(serve) as server:
        found = asyncio.run(search(server.url, [p.extra_info["question"] for p in prompts]))
    for prompt, text in zip(prompts, found, strict=True):
        assert any(answer in text for answer in prompt.ground_truth)


async def search(url: str, questions: list[str]) -> list[str]:
    """Return the best passage's contents for each question."""
    async with RetrievalClient(url) as client:
        found = await asyncio.gather(*(client.search(question) for question in questions))
    return [documents[0].contents for documents in found]


def test_unusable_folder_ends_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without texts is one message, not a traceback."""
    assert build("own_corpus", [str(tmp_path), "--out", str(tmp_path / "c.jsonl")]) == 2
    assert f"{tmp_path}: got none, expected" in capsys.readouterr().err
