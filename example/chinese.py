"""Write the example's world in Chinese: `python -m example.chinese --out DIR`.

Corpus, questions and demonstrations are those of the English example, sentence by sentence, with
the names of countries in Chinese. Names of cities stay in Latin letters, as Chinese texts often
have them, and so do the answers, which are numbers.
"""

import argparse
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from babel import Locale

from example.geography import CORPUS, DATA
from search_r1.agent.tags import named_format
from search_r1.retrieval.schema import Document

TEMPLATE = str(Path(__file__).with_name("chinese.yaml"))
FACTS = {
    "calling code": "国际区号", "ISO number": "ISO编号", "area": "面积",
    "population density": "人口密度", "capital": "首都", "population": "人口", "country": "国家",
}  # fmt: skip
UNITS = {" people per square km": "人每平方公里", " square km": "平方公里"}
OTHER_NAMES = {
    "Hong Kong": "香港", "Ivory Coast": "科特迪瓦", "Myanmar": "缅甸", "Timor Leste": "东帝汶",
    "Turkey": "土耳其",
}  # fmt: skip
"""Countries that the English locale names otherwise."""
SENTENCES = {
    r"The (.+?) of (.+) is (.+?)( people per square km| square km|)\.": "{1}的{0}是{2}{3}。",
    r"(.+) is a city in (.+)\. Its population is (\d+)\.": "{0}是{1}的城市，人口是{2}。",
    r"What is the (.+?) of (.+)\?": "{1}的{0}是多少？",
    r"(?:How many people live|How many inhabitants live) in (.+)\?": "{0}有多少人口？",
    r"How many inhabitants does (.+) have\?": "{0}的居民有多少？",
    r"Which calling code does (.+) use\?": "{0}使用哪个国际区号？",
    r"Which ISO number does (.+) have\?": "{0}的ISO编号是哪个？",
    r"How many square km does (.+) cover\?": "{0}有多少平方公里？",
    r"How many people live on a square km of (.+)\?": "{0}每平方公里有多少人？",
    r"I need to look up (.+)\.": "我要查{0}。",
    r"(.+?) lies in (.+)\. Now its (.+)\.": "{0}在{1}。再查{2}。",
    r"(.+?) lies in (.+)\. I know the number\.": "{0}在{1}。我知道这个数。",
    r"I know the number\.": "我知道这个数。",
    r"The document says it\.": "文档里有。",
    r"the country (?:where (.+) lies|of (.+))": "{0}所在国家",
    rf"(.+) ({'|'.join(FACTS)})": "{0} {1}",
}
"""Sentences, titles and queries of the example and how they read in Chinese, tried in order."""

_SHOWN = re.compile(r'Title: "(.*?)"\) (.*)')
"""A passage in an observation."""


@functools.cache
def _countries() -> dict[str, str]:
    english, chinese = Locale("en").territories, Locale("zh").territories
    return {english[code]: name for code, name in chinese.items() if code in english} | OTHER_NAMES


def translate(text: str) -> str:
    """Return a sentence, title, query or name in Chinese; names without one stay as they are."""
    for pattern, sentence in SENTENCES.items():
        if match := re.fullmatch(pattern, text):
            return sentence.format(
                *(translate(part) for part in match.groups() if part is not None)
            )
    return FACTS.get(text) or UNITS.get(text) or _countries().get(text, text)


def passage(row: dict[str, str]) -> dict[str, str]:
    """Return a row of the corpus in Chinese."""
    document = Document.from_contents(row["id"], row["contents"])
    title = f'"{translate(document.title)}"' if document.title else ""
    return {"id": row["id"], "contents": f"{title}\n{translate(document.text)}"}


def question(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the questions in Chinese, or of the demonstrations; answers stay."""
    prompt = row["prompt"][0]["content"]
    text = translate(prompt.rpartition("Question: ")[2])
    prompts = [{"role": "user", "content": named_format(TEMPLATE).user_prompt(text)}]
    row = row | {"prompt": prompts}
    if "extra_info" in row:
        row["extra_info"] = row["extra_info"] | {"question": text}
        target = row["reward_model"]["ground_truth"]["target"]
        row["reward_model"]["ground_truth"]["target"] = [_answer(value) for value in target]
    if "segments" in row:
        row["segments"] = [{**part, "text": _segment(part["text"])} for part in row["segments"]]
    return row


def _answer(value: str) -> str:
    number, space, unit = value.partition(" ")
    return number + UNITS.get(space + unit, space + unit)


def _segment(text: str) -> str:
    """Return a turn or an observation in Chinese."""
    text = _SHOWN.sub(lambda m: f'Title: "{translate(m[1])}") {translate(m[2])}', text)
    return re.sub(r"<(think|search)> (.*?) </", lambda m: f"<{m[1]}> {translate(m[2])} </", text)


def _jsonl(source: Path, target: Path, convert: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    rows = [convert(json.loads(line)) for line in source.read_text(encoding="utf-8").splitlines()]
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    target.write_text("".join(lines), encoding="utf-8")


def write_world(out: Path) -> None:
    """Write corpus.jsonl, train.parquet, val.parquet and sft.jsonl into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    _jsonl(CORPUS, out / "corpus.jsonl", passage)
    _jsonl(DATA / "sft.jsonl", out / "sft.jsonl", question)
    for name in ("train", "val"):
        rows = pq.read_table(DATA / f"{name}.parquet").to_pylist()
        pq.write_table(pa.Table.from_pylist([*map(question, rows)]), out / f"{name}.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the example's world in Chinese.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    write_world(parser.parse_args().out)


if __name__ == "__main__":
    main()
