"""What holds for all tests."""

import os
import signal

import pytest

from verl.packages import vllm_device

# A shell that starts the tests in the background has them ignore ctrl-c, which some are about;
# processes that they start would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Hide the cards, unless a test marked `gpu` was chosen; skip what vLLM's GPU build cannot do.

    `device=auto` is then the CPU in the tests and in all that they start.
    """
    if not any(item.get_closest_marker("gpu") for item in session.items):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if vllm_device() != "cpu":
        why = "needs vLLM's CPU build: make test VENV=.venv-cpu INSTALL_ARGS=--cpu"
        for item in session.items:
            if item.get_closest_marker("vllm_cpu"):
                item.add_marker(pytest.mark.skip(reason=why))
