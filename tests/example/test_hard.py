"""The harder world: answers follow from its corpus, searches find documents, nothing leaks."""

import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from example.geography import is_validation, real_world
from example.hard import CAREFUL, COUNTS, TOPK, build_tasks, found_for, write_world
from example.hard_questions import MISLED, UNKNOWN, Kind, Task
from example.model import load_tokenizer
from scripts.demo import Demo
from scripts.demo_texts import ask_with
from search_r1.retrieval.engines.bm25 import open_retriever
from search_r1.retrieval.settings import RetrieverConfig
from verl.config import cli

Row = dict[str, Any]
FACTS = {
    "calling code": "calling code",
    "ISO number": "ISO number",
    "population density|square km of": "population density",
    "area|square km": "area",
}
FACT = re.compile(r"The (calling code|ISO number|area|population density) of (.+) is (\d+).*")
CITY = re.compile(r"([\w ]+) is a city in (.+?)\.(?: Its population is (\d+)\.(?: It lies .*)?)?")
MUSEUM = re.compile(r"(\w+ Museum) is a museum in (\w+)\.")
CENSUS = re.compile(r"In (\d+) (\w+) in .+ had a population of (\d+)\.")
NOTICE = re.compile(r"The population of (\w+) is (?:now )?(\d+)(?:, not|\. The number) (\d+).*")
MUSEUM_NAME = re.compile(r"\w+ Museum")
ASKED = re.compile(r"(?:population of|live in|does) (.+?)(?: have)?(?: now)?\?")


class Reader:
    """Answers questions from the text of the corpus alone."""

    def __init__(self, corpus: Path) -> None:
        self.facts: dict[tuple[str, str], str] = {}
        self.cities: dict[str, dict[str, str | None]] = defaultdict(dict)
        self.museums: dict[str, str] = {}
        self.numbers: dict[str, dict[int, str]] = defaultdict(dict)  # by year; a notice is last
        for line in corpus.read_text(encoding="ascii").splitlines():
            text = json.loads(line)["contents"].partition("\n")[2]
            if match := FACT.fullmatch(text):
                self.facts[match[2], match[1]] = match[3]
            elif match := CITY.fullmatch(text):
                self.cities[match[1]][match[2]] = match[3]
            elif match := MUSEUM.fullmatch(text):
                self.museums[match[1]] = match[2]
            elif match := CENSUS.fullmatch(text):
                self.numbers[match[2]][int(match[1])] = match[3]
            elif match := NOTICE.fullmatch(text):
                self.numbers[match[1]][9999] = match[2]
            else:
                assert text.startswith("The capital of "), text

    def answer(self, question: str) -> str:
        """Return the answer to a question, or `unknown`."""
        if stated := re.findall(r" has (\d+)", question):
            return str((max if "larger" in question else min)(map(int, stated)))
        for words, fact in FACTS.items():
            if re.search(words, question):
                return self.facts[self.country(question), fact]
        match = ASKED.search(question)
        assert match, question
        name, _, country = match[1].partition(" in ")
        if name in self.numbers:
            return self.numbers[name][max(self.numbers[name])]
        places = self.cities.get(name, {})
        assert country or len(places) <= 1, question
        return (places.get(country) if country else next(iter(places.values()), None)) or UNKNOWN

    def country(self, question: str) -> str:
        """Return the country that a question names, or that of its city or museum."""
        named = [name for name, _ in self.facts if re.search(rf"\b{name}\b", question)]
        if named:
            return max(named, key=len)
        museum = MUSEUM_NAME.search(question)
        words = [self.museums[museum[0]]] if museum else re.findall(r"\w+", question)
        [places] = [self.cities[word] for word in words if word in self.cities]
        [country] = places
        return country


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hard")
    write_world(folder)
    return folder


@pytest.fixture(scope="module")
def tasks() -> dict[str, list[Task]]:
    return build_tasks()


@pytest.fixture(scope="module")
def demonstrations(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / "sft.jsonl").read_text("utf-8").splitlines()]


def final_answer(row: Row) -> str:
    match = re.search(r"<answer> (.*) </answer>", row["segments"][-1]["text"])
    assert match
    return match[1]


@pytest.mark.parametrize("name", ["train", "val"])
def test_answers_follow_from_the_corpus(folder: Path, name: str) -> None:
    """A reader of the corpus finds an accepted answer to each question; the kinds take turns."""
    rows = pq.read_table(folder / f"{name}.parquet").to_pylist()
    reader = Reader(folder / "corpus.jsonl")
    wrong = [
        row["extra_info"]["question"]
        for row in rows
        if reader.answer(row["extra_info"]["question"])
        not in row["reward_model"]["ground_truth"]["target"]
    ]
    assert not wrong
    assert [row["data_source"] for row in rows] == [*Kind] * COUNTS[name]
    assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
    assert len({row["extra_info"]["question"] for row in rows}) == len(rows)


def test_each_search_finds_its_documents(folder: Path, tasks: dict[str, list[Task]]) -> None:
    """The demo's retriever returns what a search has to find; of two, either may be first."""
    retriever = open_retriever(RetrieverConfig(corpus_path=str(folder / "corpus.jsonl")))
    first: Counter[tuple[Kind, bool]] = Counter()
    for task in (task for name in COUNTS for task in tasks[name]):
        for search in task.searches:
            [hits] = retriever.search([search.query], TOPK)
            assert set(search.documents) <= {hit.document for hit in hits}, search.query
            if task.kind in MISLED:
                assert len(search.documents) == 2
                first[task.kind, task.answers[0] in hits[0].document.text] += 1
    assert set(first) == {(kind, is_first) for kind in MISLED for is_first in (True, False)}
    assert min(first.values()) > 0.4 * sum(COUNTS.values())


def test_the_question_itself_finds_no_last_document_of_several(
    folder: Path, tasks: dict[str, list[Task]]
) -> None:
    """Questions of several searches need them: the last document is not found at once."""
    retriever = open_retriever(RetrieverConfig(corpus_path=str(folder / "corpus.jsonl")))
    hops = [task for task in tasks["val"] if len(task.searches) > 1]
    assert Counter(len(task.searches) for task in hops) == {2: COUNTS["val"], 3: COUNTS["val"]}
    found = retriever.search([task.text for task in hops], TOPK)
    for task, hits in zip(hops, found, strict=True):
        assert not {hit.document for hit in hits} & set(task.searches[-1].documents)


def test_validation_entities_are_in_no_training_text(
    tasks: dict[str, list[Task]], demonstrations: list[Row]
) -> None:
    """Neither in a question nor in a demonstration; these share no question with the training."""
    half = real_world(is_validation)
    names = [place.name for place in (*half.countries, *half.cities)]
    subjects = [word for task in tasks["val"] for word in re.findall(r"\w+", task.subject)]
    invented = set(subjects) - {"Museum", "New", *" ".join(names).split()}
    hidden = {*names, *invented}
    assert len(invented) > 80
    texts = [task.text for name in ("train", "sft") for task in tasks[name]]
    texts += [part["text"] for row in demonstrations for part in row["segments"]]
    text = " ".join(texts)
    words = set(re.findall(r"\w+", text))
    assert not {name for name in hidden if (name in text if " " in name else name in words)}
    assert not {task.text for task in tasks["train"]} & {task.text for task in tasks["sft"]}


def test_the_demonstrations_answer_as_often_with_care_as_they_should(
    folder: Path, tasks: dict[str, list[Task]], demonstrations: list[Row]
) -> None:
    """The share of right answers is each kind's; what a demonstration reads is the retriever's."""
    queries = [search.query for task in tasks["sft"] for search in task.searches]
    observations = found_for(queries, folder / "corpus.jsonl")
    right: Counter[str] = Counter()
    for task, row in zip(tasks["sft"], demonstrations, strict=True):
        is_careful = final_answer(row) in task.answers
        assert row == task.dialogue(is_careful, observations)
        assert task.mistake not in task.answers
        right[row["data_source"]] += is_careful
    for kind, share in CAREFUL.items():
        assert right[kind] == pytest.approx(share * COUNTS["sft"], abs=2)


def test_dialogues_fit_the_lengths_of_the_demo(
    folder: Path, tasks: dict[str, list[Task]], tmp_path: Path
) -> None:
    """With all searches, and one more of the longest: prompt, turns, observations and the whole."""
    options = Demo("grpo", 0, "cpu", tmp_path, 0.0, world="hard").options(tmp_path)
    config = cli.compose([f"actor_rollout_ref.model.path={tmp_path}", *options])
    assert config.data.val_files == str(tmp_path / "data" / "val.parquet")
    tokenizer, data = load_tokenizer(), config.data
    queries = [search.query for task in tasks["val"] for search in task.searches]
    observations = found_for(queries, folder / "corpus.jsonl")

    def length(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    longest = {"prompt": 0, "policy": 0, "observation": 0, "dialogue": 0}
    for task in tasks["val"]:
        prompt = tokenizer.apply_chat_template(
            task.prompt, tokenize=False, add_generation_prompt=True
        )
        parts = [("prompt", prompt)]
        for part in task.dialogue(True, observations)["segments"]:
            parts.append((part["origin"], part["text"]))
        lengths = [(origin, length(text)) for origin, text in parts]
        lengths.append(("dialogue", sum(number for _, number in lengths)))
        for origin, number in lengths:
            longest[origin] = max(longest[origin], number)
    assert longest["prompt"] <= data.max_start_length
    assert longest["policy"] + 8 <= data.max_response_length
    assert longest["observation"] <= data.max_obs_length
    spare = longest["policy"] + longest["observation"]
    assert longest["dialogue"] + spare <= data.max_prompt_length
    assert max(len(task.searches) for task in tasks["val"]) < config.max_turns
    assert config.retriever.topk == TOPK


def test_the_same_files_are_written_again(folder: Path, tmp_path: Path) -> None:
    write_world(tmp_path)
    for name in ("corpus.jsonl", "train.parquet", "val.parquet", "sft.jsonl"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_the_report_asks_a_held_out_question(tasks: dict[str, list[Task]]) -> None:
    """The command at the end of the report has a question of three searches."""
    _, command = ask_with("hard", Path("out"))
    assert [t.text for t in tasks["val"] if t.kind is Kind.THREE_HOP and t.text in command]
