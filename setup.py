"""The description for package indexes; all other metadata is in pyproject.toml.

An index shows README without the repository beside it. With SEARCH_R1_HOME, the address of the
repository (https://HOST/OWNER/NAME), links and pictures lead there. Without one, links become their
text and a picture its description.
"""

import os
import re
from pathlib import Path

from setuptools import setup

LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)\s]+)\)")


def index_page(text: str, home: str) -> str:
    """Return README for an index: relative links and pictures below `home`, or their text."""

    def absolute(link: re.Match[str]) -> str:
        mark, shown, target = link.groups()
        if not home:
            return f"*{shown}.*" if mark else shown
        return f"{mark}[{shown}]({home.rstrip('/')}/{'raw' if mark else 'blob'}/main/{target})"

    return LINK.sub(absolute, text)


if __name__ == "__main__":
    readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=index_page(readme, os.environ.get("SEARCH_R1_HOME", "")),
        long_description_content_type="text/markdown",
    )
