"""Reward functions from users' files: ours take a `RewardInput`, veRL's keywords.

A function with a parameter `solution_str` is one that was written for veRL or for the original
Search-R1: `compute_score(data_source, solution_str, ground_truth, extra_info)`, of which it may
leave out those it does not need. It may be asynchronous; a batch is then awaited together.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from search_r1.loops import LoopThread
from search_r1.rewards.format import strip_end_of_sequence
from search_r1.rewards.interface import (
    BatchRewardFn,
    OwnRewardError,
    RewardInput,
    RewardOutput,
)
from verl.errors import ConfigError, explain
from verl.plugins import resolve, to_outcome

OPTION = "reward_model.name"
OUR_RESULT = "a finite number, or a RewardOutput of such"
VERL_RESULT = "a finite number, or a dict with such a score"
Call = Callable[[RewardInput], Any]
Read = Callable[[Any], RewardOutput]


def load_function(spec: str) -> BatchRewardFn:
    """Load the reward ``path/to/file.py:name``, or one passed from Python under that name.

    See ``wrap_user_reward``. Raises ConfigError.
    """
    function: Callable[..., Any] = resolve(OPTION, spec, {})
    try:
        return wrap_user_reward(spec, function)
    except (AttributeError, TypeError, ValueError) as error:  # no function, or another signature
        got, expected = f"{spec} ({error})", "a function of one dialogue"
        raise ConfigError(explain(OPTION, got, expected, "see docs/guides/rewards.md")) from error


def wrap_user_reward(spec: str, function: Callable[..., Any]) -> BatchRewardFn:
    """Wrap a user's function with checks; `spec` is its name in messages.

    A function of one dialogue returns a number or a ``RewardOutput``, a function as veRL has them a
    number or a dict with ``score``. Raises TypeError for a function that cannot be called so. The
    result raises OwnRewardError, which names the row, if the function raises or returns anything
    else.
    """
    signature = inspect.signature(function)
    is_verls = "solution_str" in signature.parameters
    call, read, expected = (
        (_call_like_verl(function, signature), _read_verls_result, VERL_RESULT)
        if is_verls
        else (_call_with_dialogue(function, signature), _read_our_result, OUR_RESULT)
    )
    code = getattr(function, "__code__", None) or type(function).__call__.__code__

    def invalid(dialogue: RewardInput, got: str) -> OwnRewardError:
        shown = " ".join(got.split())[:300]
        return OwnRewardError(
            f"reward {spec} at {dialogue.uid or 'a dialogue'}: got {shown}, "
            f"expected {expected}; fix: correct the function"
        )

    def raised(dialogue: RewardInput, error: BaseException) -> OwnRewardError:
        frames = traceback.extract_tb(error.__traceback__)
        # The line in the user's file, even if a library that it calls raised the error.
        line = ([f for f in frames if f.filename == code.co_filename] or frames)[-1].lineno
        return invalid(dialogue, f"{type(error).__name__} in line {line}: {error}")

    async def finish(dialogue: RewardInput, result: Awaitable[Any]) -> Any:
        try:
            return await result
        except (Exception, SystemExit) as error:  # the user's function may raise anything
            raise raised(dialogue, error) from error

    async def finish_all(dialogues: Sequence[RewardInput], results: Sequence[Any]) -> list[Any]:
        return await asyncio.gather(*map(finish, dialogues, results))

    def score(dialogues: Sequence[RewardInput]) -> list[RewardOutput]:
        results = []
        for dialogue in dialogues:
            try:
                results.append(call(dialogue))
            except (Exception, SystemExit) as error:  # the user's function may raise anything
                raise raised(dialogue, error) from error
        if is_verls and inspect.iscoroutinefunction(function):
            results = _loop().run(finish_all(dialogues, results))
        outputs = []
        for dialogue, result in zip(dialogues, results, strict=True):
            try:
                outputs.append(read(result))
            except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
                raise invalid(dialogue, repr(result)) from error
        return outputs

    return score


@functools.cache
def _loop() -> LoopThread:
    """Return the event loop of all batches: a file's HTTP client does not outlive its loop."""
    return LoopThread().__enter__()


def _call_with_dialogue(function: Callable[..., Any], signature: inspect.Signature) -> Call:
    """Return the function itself. Raises TypeError if it does not take exactly one dialogue."""
    signature.bind(None)
    if inspect.iscoroutinefunction(function):
        raise TypeError("an async function, which is never awaited")
    return function


def _call_like_verl(function: Callable[..., Any], signature: inspect.Signature) -> Call:
    """Return a call with the keywords of veRL that the function takes. Raises TypeError."""
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    skips_example = _skips_example(function, signature)

    def arguments(dialogue: RewardInput) -> dict[str, Any]:
        offered = {
            "data_source": dialogue.data_source,
            "solution_str": skips_example * prompt_text(dialogue) + response_text(dialogue),
            "ground_truth": dialogue.row_truth or list(dialogue.ground_truth),
            "extra_info": {**dialogue.extra_info, "num_turns": len(dialogue.policy_texts)},
        }
        names = offered.keys() if takes_all else offered.keys() & signature.parameters.keys()
        return {name: offered[name] for name in names}

    signature.bind(**arguments(RewardInput([], [], ["x"])))
    return lambda dialogue: function(**arguments(dialogue))


EXAMPLE = "<|im_start|>user\n<answer> Beijing </answer><|im_end|>\n<|im_start|>assistant\n"
RIGHT = "<think>a</think>\n<answer> x </answer>"


def _skips_example(function: Callable[..., Any], signature: inspect.Signature) -> bool:
    """Whether a function counts on the prompt's example of an answer, as the original's rewards do.

    These get prompt and response, and take a single answer for the example. Only functions with the
    parameters of the original's are asked: those of others may be expensive.
    """
    names = signature.parameters.keys()
    is_originals = {"method", "format_score"} <= names and "data_source" not in names
    if not is_originals or inspect.iscoroutinefunction(function):
        return False
    try:
        alone, after = (
            to_float(function(solution_str=text, ground_truth={"target": ["x"]}))
            for text in (RIGHT, EXAMPLE + RIGHT)
        )
    except (Exception, SystemExit):  # noqa: BLE001 - any error of the user's function comes later
        return False
    return after > alone


def prompt_text(dialogue: RewardInput) -> str:
    """Return the prompt."""
    return "".join(text for origin, text in dialogue.segments if origin == "prompt")


def response_text(dialogue: RewardInput) -> str:
    """Return everything after the prompt, without the end-of-sequence text at the end."""
    texts = (text for origin, text in dialogue.segments if origin != "prompt")
    return strip_end_of_sequence("".join(texts))


def _read_our_result(result: Any) -> RewardOutput:
    output = result if isinstance(result, RewardOutput) else RewardOutput(result)
    components = {name: to_float(value) for name, value in output.components.items()}
    return RewardOutput(to_float(output.score), components, to_outcome(output.is_right))


def _read_verls_result(result: Any) -> RewardOutput:
    """Read a number, or a dict with `score`, whose other numbers are components."""
    if not isinstance(result, Mapping):
        return RewardOutput(to_float(result))
    components = {
        str(name): to_float(value)
        for name, value in result.items()
        if name != "score" and not isinstance(value, str | bytes | list | tuple | dict | None)
    }
    return RewardOutput(to_float(result["score"]), components)


def to_float(value: object) -> float:
    """Convert a number to float. Raises ValueError for strings, arrays, NaN and infinity."""
    if isinstance(value, str | bytes) or getattr(value, "ndim", 0) != 0:
        raise ValueError(f"a {type(value).__name__} is not a number")
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number
