"""The pages of retriever and viewer have a Chinese text for each of their own."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "search_r1"
DICTIONARIES = [ROOT / "retrieval" / "service" / "page.js", ROOT / "view" / "page" / "texts.js"]
SAID = re.compile(r"""(?:say|labelled)\((?:[^"()]*\? )?"([^"]+)"(?: : "([^"]+)")?""")
PLACE = re.compile(r"\{\w+\}")
ENTRY = re.compile(r"""(?:"([^"]+)"|\b([a-z]+)): *\n? *"([^"]*)"[,}\n]""", re.IGNORECASE)


def entries(file: Path) -> dict[str, str]:
    text = file.read_text(encoding="utf-8")
    block = text[text.index("CHINESE = {") : text.index("\n};", text.index("CHINESE = {")) + 1]
    return {quoted or bare: chinese for quoted, bare, chinese in ENTRY.findall(block)}


@pytest.mark.parametrize("file", DICTIONARIES, ids=["retriever", "viewer"])
def test_each_text_has_a_chinese_one(file: Path) -> None:
    """What the scripts say is in the dictionary, with the same places for values."""
    known = entries(file)
    scripts = "".join(path.read_text(encoding="utf-8") for path in file.parent.glob("*.js"))
    said = {text for match in SAID.findall(scripts) for text in match if text}
    assert len(said) > 15 and said - known.keys() == set()
    for english, chinese in known.items():
        assert sorted(PLACE.findall(english)) == sorted(PLACE.findall(chinese))
        assert re.search(r"[\u4e00-\u9fff]", chinese)


@pytest.mark.parametrize("file", DICTIONARIES, ids=["retriever", "viewer"])
def test_the_file_of_the_page_is_translated(file: Path) -> None:
    """Each text between tags is in the dictionary but for names, keys and marks."""
    html = (file.parent / "page.html").read_text(encoding="utf-8")
    html = re.sub(
        r"<noscript>.*?</noscript>|<kbd>.*?</kbd>|<!doctype.*?>", "<b>", html, flags=re.DOTALL
    )
    texts = {" ".join(text.split()) for text in re.findall(r">([^<]+)<", html)}
    assert {text for text in texts if text.strip(" ·")} - entries(file).keys() <= {"Search-R1"}
