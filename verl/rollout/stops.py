"""Stop strings, for engines that find them themselves."""

from collections.abc import Sequence


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Cut `text` after the stop string that ends first; also return whether there was one."""
    ends = [text.index(tag) + len(tag) for tag in stop if tag in text]
    return (text[: min(ends)], True) if ends else (text, False)
