"""The engine for a vLLM server that the user started: its requests and errors."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.verl.ext.servers.vllm_double import VllmDouble
from verl.config import Config
from verl.errors import AnswerInvalid, ConfigError
from verl.ext.engines import remote
from verl.ext.lora.choice import problems as adapter_problems
from verl.ext.servers import engine as servers
from verl.ext.servers.engine import VllmServer
from verl.preflight.checks import engine_problems
from verl.rollout.interface import EngineDied, build_engine
from verl.rollout.vllm_settings import WORKER_EXTENSION
from verl.types import Completion, Sampling

FOLDER = "/weights/verl-weights-abc-node/3"
Server = Callable[[httpx.Request], httpx.Response]
SAMPLING = Sampling(9, temperature=0.5, top_p=0.9, stop=("</answer>",), seed=7)


def use(server: Server, body: Callable[[VllmServer], Awaitable[Any]], **options: Any) -> Any:
    """Run `body` with a started engine for the server."""

    async def run() -> Any:
        engine = VllmServer("http://a:1/v1/", transport=httpx.MockTransport(server), **options)
        await engine.start()
        try:
            return await body(engine)
        finally:
            await engine.shutdown()

    return asyncio.run(run())


async def sample(engine: VllmServer) -> Completion:
    """Load weights and return a completion."""
    await engine.update_weights(FOLDER, 3)
    return await engine.generate([1, 2], SAMPLING)


def test_it_samples_with_the_loaded_weights() -> None:
    """The completion has version 3; the cache salt names the weights; defaults are sent."""
    server = VllmDouble()
    got = use(server, sample)
    assert got == Completion((7, 8), (-0.5, -0.25), "<answer> a </answer>", "stop", 3)
    (body,) = [body for path, body in server.asked if path == "/v1/completions"]
    assert body["cache_salt"] == server.weights == "verl-weights-abc-node.3"
    assert (body["prompt"], body["temperature"], body["top_p"]) == ([1, 2], 0.5, 0.9)
    assert (body["seed"], body["max_tokens"], body["stop"]) == (7, 9, ["</answer>"])
    assert (body["top_k"], body["repetition_penalty"], body["min_p"]) == (-1, 1.0, 0.0)
    assert body["return_token_ids"] and body["include_stop_str_in_output"]
    assert "model" not in body


def test_line_29_ids_are_scored_as_a_prompt() -> None:
    """The request draws nothing, and no later request finds its ids in the prefix cache."""

    async def score(engine: VllmServer) -> Any:
        await engine.update_weights(FOLDER, 3)
        return await engine.score([5, 6, 7])

    server = VllmDouble()
    assert use(server, score) is None  # a server that leaves the log-probs of the prompt out
    rows = [
        None,
        {"6": {"logprob": -1.5, "rank": 2}},
        {"7": {"logprob": -2.0}, "9": {"logprob": 0}},
    ]
    server.choice["prompt_logprobs"] = rows
    assert use(server, score) == [-1.5, -2.0]
    body = server.asked[-1][1]
    assert (body["prompt"], body["prompt_logprobs"], body["max_tokens"]) == ([5, 6, 7], 0, 1)
    assert (body["temperature"], body["seed"]) == (0.0, None)
    assert body["cache_salt"] not in ("", server.weights)


@pytest.mark.parametrize(
    ("extension", "call"),
    [
        (WORKER_EXTENSION, ("load_weights_in_place", {"source": FOLDER})),
        ("", ("reload_weights", {"weights_path": FOLDER})),
    ],
)
def test_weights_are_loaded_before_the_cache_is_reset_and_the_version_set(
    extension: str, call: tuple[str, dict[str, str]]
) -> None:
    """With our worker extension if the server has it, otherwise with vLLM's own method."""
    server = VllmDouble(extension=extension)
    use(server, lambda engine: engine.update_weights(FOLDER, 3))
    first = server.paths().index("/collective_rpc")
    paths = ["/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]
    assert server.paths()[first:] == paths
    assert server.asked[first][1] == {"method": call[0], "kwargs": call[1]}


def died(server: VllmDouble, change: Callable[[], Any]) -> str:
    """Return the error for a server that changes between a weight update and a request."""

    async def body(engine: VllmServer) -> None:
        await engine.update_weights(FOLDER, 3)
        change()
        await engine.generate([1], SAMPLING)

    with pytest.raises(EngineDied) as caught:
        use(server, body)
    return str(caught.value)


def test_a_restarted_server_is_lost() -> None:
    """It has its original weights again; its completion is not used."""
    server = VllmDouble()
    error = died(server, lambda: setattr(server, "weights", "default"))
    assert "has the weights 'default', not 'verl-weights-abc-node.3'" in error


@pytest.mark.parametrize("status", [500, 503])
def test_a_server_that_fails_is_lost(status: int) -> None:
    """So is one that is unavailable, and one that aborts a request because it shuts down."""
    server = VllmDouble()
    error = died(server, lambda: server.broken.update({"/v1/completions": status}))
    assert f"http://a:1/v1/completions failed: {status} broken" in error
    server = VllmDouble()
    assert "ConnectError refused" in died(server, lambda: setattr(server, "is_away", True))
    server = VllmDouble()
    assert "abort" in died(server, lambda: server.choice.update(finish_reason="abort"))


def test_a_client_error_is_a_config_error() -> None:
    """A restart does not help against a status below 500."""
    with pytest.raises(ConfigError, match=r"rollout\.url http://a:1/v1/completions: got 400"):
        use(VllmDouble(broken={"/v1/completions": 400}), sample)


@pytest.mark.parametrize(
    "part",
    [{"token_ids": None}, {"logprobs": None}, {"logprobs": {"token_logprobs": [-1.0]}},
     {"logprobs": {"token_logprobs": [-1.0, None]}}, {"text": 7}],
)  # fmt: skip
def test_tokens_without_log_probs_are_not_trained_on(part: dict[str, Any]) -> None:
    """The response of a server of another kind is reported in one line."""
    server = VllmDouble()
    server.choice |= part
    with pytest.raises(AnswerInvalid) as caught:
        use(server, sample)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["/v1/completions", "/server_info", "/weight_info"])
@pytest.mark.parametrize(
    ("headers", "size"),
    [({}, 1001), ({"Content-Encoding": "gzip"}, 9), ({}, 9)],
    ids=["long", "encoding", "no JSON"],
)
def test_an_unreadable_response_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], size: int, path: str
) -> None:
    """One that is too long, not encoded as its header says, or not what vLLM returns."""
    monkeypatch.setattr(remote, "MAX_BYTES", 1000)
    server = VllmDouble()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == path:
            stream = httpx.ByteStream(b"x" * size)
            return httpx.Response(200, headers=headers, stream=stream)
        return server(request)

    with pytest.raises(AnswerInvalid) as caught:
        use(answer, sample)
    assert "\n" not in str(caught.value)


def test_weights_that_a_running_server_cannot_read_are_a_config_error() -> None:
    """It names the folder; the fix is a shared one. A server that ends meanwhile is lost."""
    server = VllmDouble(broken={"/collective_rpc": 500})
    with pytest.raises(ConfigError, match=rf"got 500 broken for {FOLDER}.*weights_dir=/shared"):
        use(server, sample)

    async def ends(engine: VllmServer) -> None:
        server.broken["/health"] = 503
        await engine.update_weights(FOLDER, 3)

    with pytest.raises(EngineDied, match="http://a:1 ended: 500"):
        use(server := VllmDouble(broken={"/collective_rpc": 500}), ends)


def test_start_waits_for_the_server_up_to_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the engines start again after a loss; a probe fails immediately."""
    monkeypatch.setattr(servers, "POLL_S", 0.01)
    server = VllmDouble(is_away=True)
    with pytest.raises(EngineDied, match=r"trainer\.node_timeout"):
        use(server, sample, start_timeout=0.05)

    async def comes_back(engine: VllmServer) -> None:
        server.is_away = True
        with pytest.raises(EngineDied, match="http://a:1"):
            await engine.probe()
        asyncio.get_running_loop().call_later(0.05, setattr, server, "is_away", False)
        await engine.start()
        await engine.probe()

    use(server := VllmDouble(), comes_back)


def test_the_number_of_concurrent_requests_is_limited() -> None:
    """Requests beyond `max_num_seqs` wait in the engine."""
    running, max_running = 0, 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal running, max_running
        running += request.url.path == "/v1/completions"
        max_running = max(max_running, running)
        await asyncio.sleep(0)
        running -= request.url.path == "/v1/completions"
        return server(request)

    async def many() -> None:
        engine = VllmServer("http://a", max_num_seqs=2, transport=httpx.MockTransport(answer))
        await engine.start()
        await engine.update_weights(FOLDER, 3)
        await asyncio.gather(*(engine.generate([1], SAMPLING) for _ in range(7)))

    server = VllmDouble()
    asyncio.run(many())
    assert max_running == 2 and server.paths().count("/v1/completions") == 7


def test_each_address_is_an_engine() -> None:
    """Each address of `rollout.url` is an engine; in a LoRA run, servers load merged weights."""
    config = Config()
    config.actor_rollout_ref.model.path = "policy"
    config.actor_rollout_ref.rollout.url = ["http://a:1", "http://b:2/v1"]
    assert config.placement.num_engines(on_gpu=True) == 2 and not config.placement.is_colocated
    engines = [build_engine(config, replica) for replica in range(2)]
    assert [engine.url for engine in engines] == ["http://a:1", "http://b:2"]
    assert list(engine_problems(config)) == []
    config.actor_rollout_ref.model.lora_rank = 8
    assert list(engine_problems(config)) == []
    config.actor_rollout_ref.rollout.merge_adapter = False
    (problem,) = adapter_problems(config)
    assert "a server of actor_rollout_ref.rollout.url cannot load an adapter" in str(problem)
