"""No untrusted text can control a terminal or forge a log line."""

import io
import json
import logging
import unicodedata

from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from search_r1.inference.dialogue import Search
from search_r1.inference.terminal import Terminal
from search_r1.plain import PlainFormatter, escape_controls, json_line
from search_r1.retrieval.schema import Document

TEXTS = st.text(st.characters(exclude_categories=()), max_size=20)
ATTACKS = [
    "\x1b[2J", "\x1b]52;c;cm0gLXJm\x07", "\x1b]0;title\x1b\\", "\x9b31m", "\x90q\x9c", "\b" * 9,
    "\r", "\x7f", "\u202egnp.exe", "\u2066x\u2069", "\u2028", "\ud800", "\x00", "\x0b",
]  # fmt: skip


def active_characters(text: str) -> list[str]:
    """Return the characters that control a terminal or cannot be encoded."""
    bidi = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    categories = ("Cc", "Cs", "Zl", "Zp")
    return [
        c for c in text if c not in "\n\t" and (unicodedata.category(c) in categories or c in bidi)
    ]


@given(text=TEXTS)
@example(text="".join(ATTACKS))
def test_control_characters_are_escaped(text: str) -> None:
    """Every control character is escaped; all others are unchanged."""
    assert not active_characters(escape_controls(text)) and not active_characters(json_line([text]))
    assert escape_controls(text) == text.replace("\r\n", "\n") or active_characters(text)
    assert json.loads(json_line({"a": text})) == {"a": text}


def test_a_dialogue_on_a_terminal() -> None:
    """The policy's text and documents' titles, ids and texts are safe; a title is one line."""
    out = io.StringIO()
    terminal = Terminal(Console(file=out, force_terminal=False, width=999), shows_documents=True)
    for attack in ATTACKS:
        terminal.said(f"a{attack}b")
        document = Document(f"1{attack}", f"T{attack}\nAnswer: forged", f"x{attack}", "")
        terminal.searched(Search("q", (document,)))
        terminal.note(attack)
    assert not active_characters(out.getvalue())
    assert "\nAnswer" not in out.getvalue()


def test_a_log_message_cannot_forge_another() -> None:
    """Text quoted in an error is escaped and cannot start a line like another log message."""
    text = "bad row\n2026-01-01 INFO all is well\x1b[8m\r\nINFO really"
    record = logging.LogRecord("x", logging.ERROR, "", 0, "failed: %s", (text,), None)
    written = PlainFormatter("%(levelname)s %(message)s").format(record)
    assert not active_characters(written)
    assert [line.startswith("  ") for line in written.split("\n")] == [False, True, True]
