"""The Chinese pages have the structure, commands and quoted messages of the English ones."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAIRS = {
    "README_zh.md": "README.md",
    "docs/zh/quickstart.md": "docs/quickstart.md",
    "docs/zh/troubleshooting.md": "docs/troubleshooting.md",
}
BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def outline(name: str) -> list[str]:
    """Levels of headings, whole blocks of code, and the code of each row of a table, in order."""
    text = (ROOT / name).read_text(encoding="utf-8")
    found: list[str] = []
    for part in re.split(f"({BLOCK.pattern})", text, flags=re.DOTALL | re.MULTILINE):
        if part.startswith("```"):
            found.append(part)
            continue
        for line in part.splitlines():
            if line.startswith("#"):
                found.append(line.partition(" ")[0])
            elif line.startswith("|"):
                found.append(" ".join(sorted(re.findall(r"`[^`]+`", line))))
    return found


@pytest.mark.parametrize("chinese", PAIRS)
def test_a_chinese_page_says_what_the_english_one_does(chinese: str) -> None:
    """Whoever changes a command, a section or a message changes both."""
    assert outline(chinese) == outline(PAIRS[chinese])


@pytest.mark.parametrize("chinese", PAIRS)
def test_a_chinese_page_is_chinese(chinese: str) -> None:
    """Its prose was translated: more characters of Chinese than words of English."""
    prose = BLOCK.sub("", (ROOT / chinese).read_text(encoding="utf-8"))
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose)
    assert len(re.findall(r"[一-鿿]", prose)) > 2 * len(re.findall(r"[A-Za-z]{2,}", prose))
