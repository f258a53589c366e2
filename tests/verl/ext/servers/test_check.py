"""External servers are checked before a run starts; problems come with the right command."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.verl.ext.servers.vllm_double import VllmDouble
from tests.verl.rollout.engines import tiny_config
from verl.config import Config
from verl.ext.servers.check import server_problems
from verl.rollout.vllm_settings import WORKER_EXTENSION


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks run on the driver's machine."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def config_of(folder: Path, url: str = "http://127.0.0.1:8000", **given: Any) -> Config:
    """Return a run with one server."""
    config = tiny_config(folder / "model")
    config.actor_rollout_ref.rollout.url = [url]
    rollout = config.actor_rollout_ref.rollout
    rollout.temperature = given.pop("temperature", 1.0)
    rollout.server = {"weights_dir": str(folder / "weights"), **given}
    return config


def problems(config: Config, server: VllmDouble) -> list[str]:
    return [str(problem) for problem in server_problems(config, httpx.MockTransport(server))]


def test_a_suitable_server_is_checked_and_left_unchanged(tmp_path: Path) -> None:
    """With a GPU or on the CPU; the token file that it had to read is removed."""
    for server in (VllmDouble(), VllmDouble(device="cpu"), VllmDouble(extension="")):
        assert problems(config_of(tmp_path), server) == []
        assert "/update_weight_version" not in server.paths()
        assert list((tmp_path / "weights").iterdir()) == []


def test_a_server_that_fails_during_the_check_is_reported(tmp_path: Path) -> None:
    """A failure in the last request of the check is reported too."""

    def goes_away(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/collective_rpc":
            raise httpx.ReadTimeout("no answer")
        return server(request)

    server = VllmDouble()
    (line,) = map(str, server_problems(config_of(tmp_path), httpx.MockTransport(goes_away)))
    assert "got ReadTimeout: no answer, expected a server that answers" in line


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (VllmDouble(is_away=True), "got ConnectError: refused, expected a server that answers"),
        (VllmDouble(max_model_len=100), "at most 100 tokens, expected 528"),
        (VllmDouble(dtype="torch.bfloat16"), "got dtype torch.bfloat16, expected float32"),
        (VllmDouble(device="cpu", extension=""), "a server on the CPU with its own"),
        (VllmDouble(broken={"/weight_info": 404}), "404 for /weight_info, expected a vLLM server"),
        (VllmDouble(broken={"/v1/models": 500}), "500 for /v1/models"),
    ],
    ids=["away", "short", "dtype", "cpu", "plain", "broken"],
)
def test_problems_of_a_start_come_with_the_right_command(
    server: VllmDouble, message: str, tmp_path: Path
) -> None:
    """On one line; the command has all settings that the run needs."""
    (line,) = problems(config_of(tmp_path), server)
    assert message in line and "\n" not in line
    assert "actor_rollout_ref.rollout.url http://127.0.0.1:8000: got" in line
    start = "python -m vllm.entrypoints.openai.api_server --model"
    command = f"VLLM_SERVER_DEV_MODE=1 {start} {tmp_path / 'model'} --port 8000"
    rest = "--max-model-len 528 --dtype float32 --logprobs-mode processed_logprobs"
    rest += " --generation-config vllm"
    assert f"{command} {rest} --worker-extension-cls {WORKER_EXTENSION}" in line


def test_log_probs_must_be_of_the_sampled_distribution(tmp_path: Path) -> None:
    """vLLM's default ignores the temperature, which is the same only at temperature 1."""
    warm = config_of(tmp_path, temperature=0.8)
    (line,) = problems(warm, VllmDouble())
    assert "got --logprobs-mode raw_logprobs, expected processed_logprobs" in line
    assert problems(warm, VllmDouble(logprobs_mode="processed_logprobs")) == []
    (line,) = problems(config_of(tmp_path), VllmDouble(logprobs_mode="raw_logits"))
    assert "raw_logits" in line


def test_the_named_model_must_be_served(tmp_path: Path) -> None:
    """Without a name, any model of the server is accepted."""
    assert problems(config_of(tmp_path, served_model="policy"), VllmDouble()) == []
    (line,) = problems(config_of(tmp_path, served_model="other"), VllmDouble())
    assert "['policy'], expected rollout.served_model=other" in line
    assert "--served-model-name other" in line


def test_the_key_comes_from_the_named_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing key, and a variable that is not set, are reported with the option."""
    monkeypatch.setenv("OWN_KEY", "secret")
    server = VllmDouble(key="secret")
    assert problems(config_of(tmp_path, api_key_env="OWN_KEY"), server) == []
    (line,) = problems(config_of(tmp_path), server)
    assert "401 for /v1/models, expected its key" in line and "api_key_env=NAME" in line
    (line,) = problems(config_of(tmp_path, api_key_env="NOT_SET"), server)
    assert "export NOT_SET=KEY" in line


def test_an_invalid_address_is_reported_with_its_option(tmp_path: Path) -> None:
    """The error has the option's name in a training run."""
    (line,) = problems(config_of(tmp_path, "http://[::1"), VllmDouble())
    assert line.startswith("actor_rollout_ref.rollout.url: got http://[::1")


def test_a_server_must_be_able_to_read_the_weights_folder(tmp_path: Path) -> None:
    """On another machine it needs a shared folder; one that cannot read the folder is refused."""
    (line,) = problems(config_of(tmp_path), VllmDouble(sees_files=False))
    assert f"cannot read files in {tmp_path / 'weights'}" in line and "weights_dir=/shared" in line
    far = config_of(tmp_path, "http://192.0.2.1:8000", weights_dir=None)
    (line,) = problems(far, VllmDouble())
    assert "got another machine" in line and "weights_dir=/shared" in line
    far.actor_rollout_ref.rollout.server = {"weights_dir": str(tmp_path / "shared")}
    assert problems(far, VllmDouble()) == []


def test_an_impossible_weights_folder_is_refused(tmp_path: Path) -> None:
    """The folder is checked before any request to a server."""
    (tmp_path / "file").touch()
    server = VllmDouble()
    (line,) = problems(config_of(tmp_path, weights_dir=str(tmp_path / "file" / "w")), server)
    assert "rollout.weights_dir: got" in line and server.asked == []
