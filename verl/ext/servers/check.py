"""Checks the vLLM servers that a run samples from, before it starts.

Each server must answer, accept the longest trajectory, compute in the run's dtype, and be able to
load new weights from the folder that the ranks write.
"""

import logging
import shlex
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
from pydantic import BaseModel

from verl.config import Config
from verl.errors import ConfigError, ResourceError, UserError, explain, redact
from verl.ext.engines.remote import auth_headers, server_root
from verl.ext.servers.answers import SERVER_INFO_PATH, ServerInfo, WeightInfo
from verl.ext.servers.choice import WEIGHTS_DIR
from verl.ports import is_local_host
from verl.proxies import client_settings
from verl.rollout.interface import URL
from verl.rollout.vllm_settings import WORKER_EXTENSION
from verl.training.devices import device_type, rollout_dtype
from verl.training.loading import weight_bytes
from verl.training.network import joins_cluster
from verl.weights.node_folder import NodeFolder, new_path

logger = logging.getLogger(__name__)

ANSWER_S = 60.0
"""Seconds per request: a server inspects its whole system before it first reports its settings."""
CPU_COMMAND = ("python", "-m", "vllm.entrypoints.openai.api_server", "--model")
"""Equivalent of `vllm serve`, which does not start in vLLM's CPU build."""
PROCESSED, RAW = "processed_logprobs", "raw_logprobs"


class _Model(BaseModel):
    id: str
    max_model_len: int


class _Models(BaseModel):
    data: list[_Model]


def server_problems(
    config: Config, transport: httpx.BaseTransport | None = None
) -> Iterator[UserError]:
    """Yield why the run cannot sample from the servers of `rollout.url`."""
    problem = _folder_problem(config)
    if problem is not None:
        yield problem
        return
    for url in config.placement.servers:
        try:
            yield from _ServerCheck(config, server_root(url, URL), transport).problems()
        except ConfigError as error:  # an invalid address or API key
            yield error


def _folder_problem(config: Config) -> ResourceError | None:
    """Return why `weights_dir` cannot hold the weight versions that exist at the same time."""
    section = config.actor_rollout_ref
    if section.rollout.weights_dir is None:
        return None
    folder = Path(section.rollout.weights_dir).absolute()
    needed = section.rollout.num_weight_versions * weight_bytes(section.model.path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        NodeFolder(new_path(folder)).close()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        fix = f"{WEIGHTS_DIR}=/shared/weights, a folder that can be written and locked"
        return ResourceError(explain(WEIGHTS_DIR, f"{folder} ({error})", "a folder", fix))
    if free >= needed:
        return None
    got, expected = f"{free / 2**30:.1f} GiB free", f"{needed / 2**30:.1f} GiB for the weights"
    return ResourceError(explain(f"{WEIGHTS_DIR}={folder}", got, expected, "name another folder"))


class _ServerCheck:
    def __init__(self, config: Config, url: str, transport: httpx.BaseTransport | None) -> None:
        self.config, self.url = config, url
        self.rollout = config.actor_rollout_ref.rollout
        headers = auth_headers(url, self.rollout.api_key_env)
        self.http = httpx.Client(
            headers=headers, timeout=ANSWER_S, transport=transport, **client_settings(url)
        )

    def problems(self) -> Iterator[ConfigError]:
        """Yield the server's problems, without those that only follow from an earlier one."""
        with self.http:
            try:
                models = _Models.model_validate_json(self._get("/v1/models"))
                WeightInfo.model_validate_json(self._get("/weight_info"))
                facts = ServerInfo.model_validate_json(self._get(SERVER_INFO_PATH))
                yield from self._setting_problems(models.data, facts)
            except httpx.HTTPStatusError as error:
                yield self._status_problem(error.response)
            except httpx.HTTPError as error:
                yield self._problem(f"{type(error).__name__}: {error}", "a server that answers")
            except ValueError as error:
                got = f"another answer ({' '.join(str(error).split())[:200]})"
                yield self._problem(got, "a vLLM server, 0.32 or newer")

    def _get(self, path: str) -> bytes:
        return self.http.get(self.url + path).raise_for_status().content

    def _status_problem(self, answer: httpx.Response) -> ConfigError:
        path, status = answer.url.path, answer.status_code
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            got = f"{status} for {path}"
            fix = "name the variable that holds it: actor_rollout_ref.rollout.api_key_env=NAME"
            return ConfigError(explain(f"{URL} {self.url}", got, "its key", fix))
        expected = "a vLLM server, 0.32 or newer, in development mode, which loads weights"
        return self._problem(f"{status} for {path}", expected)

    def _problem(self, got: str, expected: str) -> ConfigError:
        """Return a problem that is fixed by starting the server with `self.command`."""
        return ConfigError(explain(f"{URL} {self.url}", got, expected, f"start it: {self.command}"))

    @property
    def command(self) -> str:
        """The command that starts a server suitable for the run."""
        port, rollout = httpx.URL(self.url).port or 80, self.rollout
        model, longest = self.config.actor_rollout_ref.model.path, self.config.data.max_model_len
        is_cpu = device_type(self.config.trainer.device) == "cpu"
        arguments = [*(CPU_COMMAND if is_cpu else ("vllm", "serve")), model,
                     "--port", str(port), "--max-model-len", str(longest),
                     "--dtype", rollout_dtype(self.config), "--logprobs-mode", PROCESSED,
                     "--generation-config", "vllm",
                     "--worker-extension-cls", WORKER_EXTENSION]  # fmt: skip
        if rollout.served_model is not None:
            arguments += ["--served-model-name", rollout.served_model]
        return f"VLLM_SERVER_DEV_MODE=1 {shlex.join(arguments)}"

    def _setting_problems(self, models: list[_Model], facts: ServerInfo) -> Iterator[ConfigError]:
        """Yield the server's settings that do not suit the run."""
        served, names = self.rollout.served_model, [model.id for model in models]
        if not names or (served is not None and served not in names):
            expected = "a model" if served is None else f"rollout.served_model={served}"
            yield self._problem(f"the models {names}", expected)
            return
        model = models[0 if served is None else names.index(served)]
        longest, dtype = self.config.data.max_model_len, rollout_dtype(self.config)
        if model.max_model_len < longest:
            got = f"at most {model.max_model_len} tokens"
            expected = f"{longest}: data.max_prompt_length and max_response_length"
            yield self._problem(got, expected)
        # On a cluster the driver's node may lack the GPUs by which `auto` is resolved.
        is_known = self.config.trainer.device != "auto" or not joins_cluster()
        if is_known and facts.dtype.removeprefix("torch.") != dtype:
            expected = f"{dtype}, in which the run computes (actor_rollout_ref.rollout.dtype)"
            yield self._problem(f"dtype {facts.dtype}", expected)
        # Without temperature and top-p, raw and processed log-probs are the same.
        is_plain = self.rollout.temperature == 1 and self.rollout.top_p == 1
        if facts.logprobs_mode != PROCESSED and not (is_plain and facts.logprobs_mode == RAW):
            expected = f"{PROCESSED}, of the distribution that is sampled from"
            yield self._problem(f"--logprobs-mode {facts.logprobs_mode}", expected)
        if facts.device == "cpu" and not facts.loads_in_place:
            got = f"a server on the CPU with {facts.extension or 'its own'}"
            expected = "our weight loader: on the CPU, vLLM's own does not update a tied head"
            yield self._problem(got, expected)
            return
        yield from self._folder_problems(facts)
        logger.info("server %s: %s, %d tokens, %s", redact(self.url), model.id,
                    model.max_model_len, dtype)  # fmt: skip

    def _folder_problems(self, facts: ServerInfo) -> Iterator[ConfigError]:
        """Check that the server can read files written here."""
        weights_dir = self.rollout.weights_dir
        key, fix = f"{URL} {self.url}", f"{WEIGHTS_DIR}=/shared/weights, which both can read"
        if weights_dir is None and joins_cluster():
            return  # the ranks may be on other machines
        if weights_dir is None and not is_local_host(httpx.URL(self.url).host):
            expected = "a server on this machine: weights go through its memory"
            yield ConfigError(explain(key, "another machine", expected, fix))
        elif facts.loads_in_place:  # others cannot be asked; their first transfer would fail
            root = None if weights_dir is None else Path(weights_dir).absolute()
            with closing(NodeFolder(new_path(root))) as folder:
                token = folder.path / "token"
                token.touch()
                body = {"method": "can_read", "kwargs": {"path": str(token)}}
                answer = self.http.post(f"{self.url}/collective_rpc", json=body)
            if not answer.is_success or "False" in answer.text:
                got = f"a server that cannot read files in {folder.path.parent}"
                yield ConfigError(explain(key, got, "one folder for ranks and servers", fix))
