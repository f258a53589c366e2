"""The Chinese pages have the structure, commands and quoted messages of the English pages."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAIRS = {
    "README_zh.md": "README.md",
    "docs/zh/quickstart.md": "docs/start/quickstart.md",
    "docs/zh/troubleshooting.md": "docs/guides/troubleshooting.md",
}
BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def outline(name: str) -> list[str]:
    """Return the headings' levels, the code blocks, and the code in each table row, in order."""
    text = (ROOT / name).read_text(encoding="utf-8")
    parts: list[str] = []
    for part in re.split(f"({BLOCK.pattern})", text, flags=re.DOTALL | re.MULTILINE):
        if part.startswith("```"):
            parts.append(part)
            continue
        for line in part.splitlines():
            if line.startswith("#"):
                parts.append(line.partition(" ")[0])
            elif line.startswith("|"):
                parts.append(" ".join(sorted(re.findall(r"`[^`]+`", line))))
    return parts


@pytest.mark.parametrize("chinese", PAIRS)
def test_a_chinese_page_has_the_outline_of_the_english_page(chinese: str) -> None:
    """Commands, sections and messages are changed on both pages."""
    assert outline(chinese) == outline(PAIRS[chinese])


@pytest.mark.parametrize("chinese", PAIRS)
def test_a_chinese_page_is_chinese(chinese: str) -> None:
    """The prose is translated: it has more Chinese characters than English words."""
    prose = BLOCK.sub("", (ROOT / chinese).read_text(encoding="utf-8"))
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose)
    assert len(re.findall(r"[一-鿿]", prose)) > 2 * len(re.findall(r"[A-Za-z]{2,}", prose))
