"""`search-r1 example`: a corpus, questions about it, a tiny policy and settings that train it.

They are written to `example/` in the current folder, where a clone has them, so that the same
commands work there. The training takes minutes on a CPU.
"""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from search_r1.options import run
from verl.errors import ConfigError, explain

FILES = ("corpus.jsonl", "data", "policy", "tiny.yaml")
TARGET = Path("example")
NEXT = """\
search-r1 serve-retriever --corpus-path example/corpus.jsonl &
search-r1 train --config-dir example --config-name tiny
"""
"""The commands that train the policy. Training waits for the retriever, which starts sooner."""


@dataclass(frozen=True, kw_only=True)
class ExampleOptions:
    """None, since the settings name the files by their paths below the current folder."""


def write(_: ExampleOptions) -> int:
    """Write the example and print what to run next; returns the exit status.

    Raises ConfigError if the folder exists.
    """
    if TARGET.exists():
        fix = "use it if it is the example (a clone has it), or change to another folder"
        raise ConfigError(explain(f"folder {TARGET}", "one that exists", "none", fix))
    part = TARGET.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)  # an interrupted attempt
    part.mkdir()
    for source in (Path(__file__).with_name(name) for name in FILES):
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, part / source.name)
    part.rename(TARGET)
    sys.stdout.write(f"wrote {TARGET}/; to train its policy:\n{NEXT}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Write the example; returns the exit status."""
    return run(f"{__name__}:write", ExampleOptions, argv, prog="search-r1 example",
               description=__doc__)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
