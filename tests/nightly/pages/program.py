"""Runs a page's Python program with a stand-in for the training, and transformers as engine."""

import functools
import runpy
import sys

import search_r1.asking
from tests.nightly.pages.trainer import stand_in
from verl.trainer import run

CPU_ENGINE = {"engine": "transformers", "device": "cpu"}


if __name__ == "__main__":
    run.run = stand_in
    asking = search_r1.asking
    asking.load_agent = functools.partial(asking.load_agent, **CPU_ENGINE)  # type: ignore[assignment]
    asking.evaluate = functools.partial(asking.evaluate, num_rows=1, **CPU_ENGINE)  # type: ignore[assignment]
    runpy.run_path(sys.argv[1], run_name="__main__")
