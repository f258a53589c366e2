"""The command `search-r1 COMMAND …`; the module of a command is imported when it is called."""

import importlib
import sys
from collections.abc import Callable, Sequence

from search_r1.variables import warn_of_near_misses
from verl.errors import ConfigError, did_you_mean, explain
from verl.logs import exit_status

COMMANDS = {
    "example": ("search_r1.example.command", "write a small corpus, questions and a tiny policy"),
    "train": ("verl.trainer.main_ppo", "train a policy with PPO or GRPO; takes Hydra overrides"),
    "serve-retriever": ("search_r1.retrieval.command", "serve a corpus to the agents"),
    "index": ("search_r1.retrieval.index_builder", "build a BM25 or dense index of a corpus"),
    "download": ("search_r1.datasets.download", "fetch the published corpus and indexes"),
    "data": ("search_r1.datasets.command", "build question files and corpora"),
    "sft": ("verl.ext.sft.trainer", "supervised training on dialogues; takes Hydra overrides"),
    "evaluate": ("search_r1.evaluation.__main__", "score a model or baseline; compare evaluations"),
    "view": ("search_r1.view.command", "show runs and their trajectories in a browser"),
    "replay": (
        "search_r1.experimental.replay.command",
        "experimental: replay a recorded trajectory, as it was or edited",
    ),
    "infer": ("search_r1.infer", "ask one question, a conversation, or a file of questions"),
    "serve": ("search_r1.serve", "serve the agent to OpenAI clients, with a chat page"),
    "mcp": ("search_r1.mcp_server", "serve the retriever as a tool of the Model Context Protocol"),
    "checkpoint": ("verl.checkpoint.__main__", "export a checkpoint as a Hugging Face folder"),
    "push": (
        "search_r1.sharing.push",
        "share a trained model with its card: hub or folder",
    ),
    "doctor": ("verl.ext.doctor", "check this machine's hardware and installed packages"),
}
"""Command name -> module with a function `main(argv)`, and a one-line description."""
FALLEN = {
    "plan": "it simulated cards that no card confirmed, and is gone since 2026-11-28; "
    "docs/guides/rollouts.md has the formula that takes its place",
    "credit": "it measured each document's part in an answer without a use for it, and is gone "
    "since 2026-11-29; search-r1 replay shows how a dialogue goes on with other documents",
}
"""Commands that no longer exist: what they were, since when they are gone, and what to use."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named by the first argument; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(usage())
        return 0 if arguments else 2
    name, *others = arguments
    if name not in COMMANDS:
        fix = FALLEN.get(name) or did_you_mean(name, COMMANDS, "search-r1 --help lists them")
        sys.stderr.write(f"search-r1: got {name}, expected a command; fix: {fix}\n")
        return 2
    warn_of_near_misses()
    # A command may return None for success, or raise SystemExit.
    return exit_status(lambda: _main_of(name)(others))


def _main_of(name: str) -> Callable[[Sequence[str]], int | None]:
    """Import a command. Raises ConfigError if its package, which may be deleted, is gone."""
    path = COMMANDS[name][0]
    try:
        return importlib.import_module(path).main  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        if not f"{path}.".startswith(f"{error.name}."):
            raise  # an installed package that the command needs
        fix = "install this release again"
        raise ConfigError(
            explain(name, f"no {error.name}", "the folder of the command", fix)
        ) from error


def usage() -> str:
    width = max(map(len, COMMANDS))
    rows = [f"  {name:{width}}  {description}" for name, (_, description) in COMMANDS.items()]
    lines = ["usage: search-r1 COMMAND ...", "", *rows, "", "search-r1 COMMAND --help says more"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
