"""A server that the user started as an engine: what it is asked, and what its answers lead to."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.verl.rollout.vllm_double import VllmDouble
from verl.config import Config
from verl.errors import AnswerInvalid, ConfigError
from verl.rollout import vllm_server
from verl.rollout.interface import INTERRUPTED, EngineDied, build_engine, engine_problems
from verl.rollout.vllm_server import VllmServer
from verl.types import Completion, Sampling

FOLDER = "/weights/verl-weights-abc-node/3"
SAMPLING = Sampling(9, temperature=0.5, top_p=0.9, stop=("</answer>",), seed=7)


def use(server: VllmDouble, body: Callable[[VllmServer], Awaitable[Any]], **options: Any) -> Any:
    """What `body` does with a started engine over the server."""

    async def run() -> Any:
        engine = VllmServer("http://a:1/v1/", transport=httpx.MockTransport(server), **options)
        await engine.start()
        try:
            return await body(engine)
        finally:
            await engine.shutdown()

    return asyncio.run(run())


async def sample(engine: VllmServer) -> Completion:
    """A completion by weights that it was given."""
    await engine.update_weights(FOLDER, 3)
    return await engine.generate([1, 2], SAMPLING)


def test_it_samples_by_the_weights_that_it_was_given() -> None:
    """As sampled, by version 3; the salt of its cache is those weights', and defaults are ours."""
    server = VllmDouble()
    got = use(server, sample)
    assert got == Completion((7, 8), (-0.5, -0.25), "<answer> a </answer>", "stop", 3)
    (body,) = [body for path, body in server.asked if path == "/v1/completions"]
    assert body["cache_salt"] == server.weights == "verl-weights-abc-node.3"
    assert (body["prompt"], body["temperature"], body["top_p"]) == ([1, 2], 0.5, 0.9)
    assert (body["seed"], body["max_tokens"], body["stop"]) == (7, 9, ["</answer>"])
    assert (body["top_k"], body["repetition_penalty"], body["min_p"]) == (0, 1.0, 0.0)
    assert body["return_token_ids"] and body["include_stop_str_in_output"]
    assert "model" not in body


@pytest.mark.parametrize(
    ("extension", "call"),
    [
        (vllm_server.WORKER_EXTENSION, ("load_weights_in_place", {"weights_dir": FOLDER})),
        ("", ("reload_weights", {"weights_path": FOLDER})),
    ],
)
def test_weights_are_read_before_anything_is_told_of_them(
    extension: str, call: tuple[str, dict[str, str]]
) -> None:
    """By our way of loading where the server has it; then old prefixes go, then the name is new."""
    server = VllmDouble(extension=extension)
    use(server, lambda engine: engine.update_weights(FOLDER, 3))
    first = server.paths().index("/collective_rpc")
    paths = ["/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]
    assert server.paths()[first:] == paths
    assert server.asked[first][1] == {"method": call[0], "kwargs": call[1]}


def died(server: VllmDouble, change: Callable[[], Any]) -> str:
    """What is said of a server that changes between its weights and a request."""

    async def body(engine: VllmServer) -> None:
        await engine.update_weights(FOLDER, 3)
        change()
        await engine.generate([1], SAMPLING)

    with pytest.raises(EngineDied) as told:
        use(server, body)
    return str(told.value)


def test_a_server_that_was_started_again_is_lost() -> None:
    """It has the weights of its start; what it sampled is not taken."""
    server = VllmDouble()
    said = died(server, lambda: setattr(server, "weights", "default"))
    assert "has the weights 'default', not 'verl-weights-abc-node.3'" in said


@pytest.mark.parametrize("status", [500, 503])
def test_a_server_that_fails_is_lost(status: int) -> None:
    """So are one that is away, and one that ends a request because it ends itself."""
    server = VllmDouble()
    said = died(server, lambda: server.broken.update({"/v1/completions": status}))
    assert f"http://a:1/v1/completions failed: {status} broken" in said
    server = VllmDouble()
    assert "ConnectError refused" in died(server, lambda: setattr(server, "is_away", True))
    server = VllmDouble()
    assert "abort" in died(server, lambda: server.choice.update(finish_reason="abort"))


def test_a_refused_request_is_the_users_to_mend() -> None:
    """No restart helps against a status below 500."""
    with pytest.raises(ConfigError, match=r"rollout\.url http://a:1/v1/completions: got 400"):
        use(VllmDouble(broken={"/v1/completions": 400}), sample)


@pytest.mark.parametrize(
    "part",
    [{"token_ids": None}, {"logprobs": None}, {"logprobs": {"token_logprobs": [-1.0]}},
     {"logprobs": {"token_logprobs": [-1.0, None]}}, {"text": 7}],
)  # fmt: skip
def test_tokens_without_log_probs_are_not_trained_on(part: dict[str, Any]) -> None:
    """A server of another kind is told in one line."""
    server = VllmDouble()
    server.choice |= part
    with pytest.raises(AnswerInvalid, match="expected a completion of token ids") as told:
        use(server, sample)
    assert "\n" not in str(told.value)


def test_weights_that_a_living_server_cannot_read_name_the_folder() -> None:
    """The fix is a shared one; a server that ended over them is lost instead."""
    server = VllmDouble(broken={"/collective_rpc": 500})
    with pytest.raises(ConfigError, match=rf"got 500 broken for {FOLDER}.*weights_dir=/shared"):
        use(server, sample)

    async def ends(engine: VllmServer) -> None:
        server.broken["/health"] = 503
        await engine.update_weights(FOLDER, 3)

    with pytest.raises(EngineDied, match="http://a:1 ended: 500"):
        use(server := VllmDouble(broken={"/collective_rpc": 500}), ends)


def test_it_is_waited_for_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start, and when the engines start again after a loss; a probe tells at once."""
    monkeypatch.setattr(vllm_server, "POLL_S", 0.01)
    server = VllmDouble(is_away=True)
    with pytest.raises(EngineDied, match=r"has not answered for 0 s \(trainer\.node_timeout\)"):
        use(server, sample, start_timeout=0.05)

    async def comes_back(engine: VllmServer) -> None:
        server.is_away = True
        with pytest.raises(EngineDied, match="http://a:1 does not answer"):
            await engine.probe()
        asyncio.get_running_loop().call_later(0.05, setattr, server, "is_away", False)
        await engine.start()
        await engine.probe()

    use(server := VllmDouble(), comes_back)


def test_no_more_is_asked_at_once_than_it_decodes() -> None:
    """Requests beyond `max_num_seqs` wait here."""
    running, most = 0, 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += request.url.path == "/v1/completions"
        most = max(most, running)
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
    assert most == 2 and server.paths().count("/v1/completions") == 7


def test_new_weights_end_what_is_sampled() -> None:
    """Each of our requests gives the tokens that it has; one that began late is asked again."""
    cut: set[str] = set()

    async def answer(request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content or b"null")
        if path == "/abort_requests":
            cut.update(body["request_ids"] if server.paths().count(path) else [])
        elif path == "/v1/completions":
            while f"cmpl-{body['request_id']}-0" not in cut:
                await asyncio.sleep(0.001)
        return server(request)

    async def both() -> list[Completion]:
        engine = VllmServer("http://a", transport=httpx.MockTransport(answer))
        await engine.start()
        await engine.update_weights(FOLDER, 3)
        asked = [asyncio.create_task(engine.generate([i], SAMPLING)) for i in range(2)]
        await asyncio.sleep(0.01)
        await engine.interrupt()
        return await asyncio.gather(*asked)

    server = VllmDouble()
    server.choice |= {"finish_reason": "abort", "text": "so"}
    for one in asyncio.run(both()):
        assert (one.ids, one.text, one.finish_reason) == ((7, 8), "so", INTERRUPTED)
    assert len(cut) == 2 and server.paths().count("/abort_requests") > 1
    server.choice |= {"token_ids": [], "logprobs": {"token_logprobs": []}, "text": ""}
    cut.clear()
    assert [one.ids for one in asyncio.run(both())] == [(), ()]


def test_new_weights_wait_for_nothing_that_waits_for_a_slot() -> None:
    """Else whatever a server has no room for yet would be sampled whole, by the old ones."""
    is_cut = False

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal is_cut
        is_cut |= request.url.path == "/abort_requests"
        while request.url.path == "/v1/completions" and not is_cut:
            await asyncio.sleep(0.001)
        return server(request)

    async def many() -> list[Completion]:
        engine = VllmServer("http://a", max_num_seqs=2, transport=httpx.MockTransport(answer))
        await engine.start()
        await engine.update_weights(FOLDER, 3)
        asked = [asyncio.create_task(engine.generate([i], SAMPLING)) for i in range(7)]
        await asyncio.sleep(0.01)
        await engine.interrupt()
        assert all(task.done() for task in asked)
        return [task.result() for task in asked]

    server = VllmDouble()
    server.choice |= {"finish_reason": "abort", "text": "so"}
    found = asyncio.run(many())
    assert {one.finish_reason for one in found} == {INTERRUPTED}
    assert [len(one.ids) for one in found] == [2, 2, 0, 0, 0, 0, 0]
    assert server.paths().count("/v1/completions") == 2


def test_each_address_is_an_engine() -> None:
    """Of a run with `rollout.url`; a LoRA run gives servers the merged weights."""
    config = Config()
    config.actor_rollout_ref.model.path = "policy"
    config.actor_rollout_ref.rollout.url = ["http://a:1", "http://b:2/v1"]
    assert config.num_engines(on_gpu=True) == 2 and not config.is_colocated
    engines = [build_engine(config, replica) for replica in range(2)]
    assert [engine.url for engine in engines] == ["http://a:1", "http://b:2"]
    assert list(engine_problems(config)) == []
    config.actor_rollout_ref.model.lora_rank = 8
    assert list(engine_problems(config)) == []
    config.actor_rollout_ref.rollout.merge_adapter = False
    (problem,) = engine_problems(config)
    assert "a server of actor_rollout_ref.rollout.url cannot load an adapter" in str(problem)
