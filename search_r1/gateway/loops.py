"""The user's loop: a function in a file, called once an episode with what it asks for by name."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

from search_r1.gateway.service import MODEL
from search_r1.loops import LoopThread
from verl import plugins
from verl.config import Config
from verl.errors import ConfigError, explain
from verl.types import Prompt

PREFIX = "loop:"
GIVEN = ("client", "base_url", "api_key", "model", "question", "extra_info")
"""Arguments that a loop may have: an OpenAI client, or what makes one, and the row."""
OPTION = "agent.name"


@dataclass(frozen=True)
class UserLoop:
    """A function that plays an episode, synchronously or not."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]

    @classmethod
    def of_run(cls, config: Config) -> Self:
        """Load the function that `agent.name` names. Raises ConfigError for none that fits."""
        name = config.agent.name
        path = name.removeprefix(PREFIX)
        if not plugins.is_path(path):
            fix = "write the file of your loop and the function in it"
            raise ConfigError(explain(OPTION, name, f"{PREFIX}path/file.py:function", fix))
        function: Any = plugins.resolve(OPTION, path, {})
        if not inspect.isroutine(function):
            expected = f"a function, with some of {', '.join(GIVEN)}"
            raise ConfigError(explain(OPTION, f"{name}, no function", expected, "name a function"))
        found = inspect.signature(function).parameters
        named = [p for p in found.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        for parameter in named:
            if parameter.name not in GIVEN and parameter.default is parameter.empty:
                near = difflib.get_close_matches(parameter.name, GIVEN, n=1)
                fix = f"call it {near[0]}" if near else "give it a default"
                got = f"the argument {parameter.name} of {name}"
                raise ConfigError(explain(OPTION, got, f"some of {', '.join(GIVEN)}", fix))
        arguments = tuple(p.name for p in named if p.name in GIVEN)
        if not {"client", "base_url"} & {*arguments}:
            got = f"{name}, which takes neither client nor base_url"
            fix = "def run(client, question): …"
            raise ConfigError(explain(OPTION, got, "a loop that can ask the policy", fix))
        if "client" in arguments and importlib.util.find_spec("openai") is None:
            got = f"{name}, whose client needs the package openai, which is missing"
            raise ConfigError(explain(OPTION, got, "that package", "pip install openai"))
        return cls(name, function, arguments)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def values(self, base_url: str, key: str, question: str, prompt: Prompt) -> Mapping[str, Any]:
        """Return what the function gets in an episode, except for a client."""
        known = {
            "base_url": base_url, "api_key": key, "model": MODEL, "question": question,
            "extra_info": dict(prompt.extra_info),
        }  # fmt: skip
        return {name: value for name, value in known.items() if name in self.arguments}

    async def play(self, base_url: str, key: str, values: Mapping[str, Any]) -> Any:
        """Call an asynchronous function, in its own event loop."""
        if "client" not in self.arguments:
            return await self.function(**values)
        async with _clients().AsyncOpenAI(
            base_url=base_url, api_key=key, http_client=_http().AsyncClient(**HTTP), **CLIENT
        ) as client:
            return await self.function(client=client, **values)

    def play_in_thread(self, base_url: str, key: str, values: Mapping[str, Any]) -> Any:
        """Call a plain function, in a thread of its own."""
        if "client" not in self.arguments:
            return self.function(**values)
        with _clients().OpenAI(
            base_url=base_url, api_key=key, http_client=_http().Client(**HTTP), **CLIENT
        ) as client:
            return self.function(client=client, **values)


CLIENT: Mapping[str, Any] = {"max_retries": 0, "timeout": None}
"""An episode waits for its engine as long as it takes, and no turn is sampled twice."""
HTTP: Mapping[str, Any] = {"trust_env": False, "verify": False, "timeout": None}
"""Plain HTTP to this machine: no proxies, and no certificates, which take long to read."""


def _clients() -> Any:
    import openai  # noqa: PLC0415 - a second, and only for loops that want a client

    return openai


def _http() -> Any:
    """Return the HTTP library that the package openai is built on."""
    import httpx  # noqa: PLC0415

    return httpx


class Players:
    """Where loops run, away from the engine's event loop: what blocks there blocks no sampling."""

    def __init__(self, loop: UserLoop) -> None:
        self.loop = loop
        self._thread: LoopThread | None = None

    def start(self, base_url: str, key: str, values: Mapping[str, Any]) -> Future[Any]:
        """Start an episode's loop; the result is what it returns or raises."""
        if self.loop.is_async:
            if self._thread is None:
                self._thread = LoopThread().__enter__()
            return self._thread.start(self.loop.play(base_url, key, values))
        return in_thread(lambda: self.loop.play_in_thread(base_url, key, values))


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Run a function in a thread that ends with it, and not later than the process."""
    future: Future[Any] = Future()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - raised where the result is read
                future.set_exception(error)
            else:
                future.set_result(result)

    threading.Thread(target=run, name="search-r1-loop", daemon=True).start()
    return future
