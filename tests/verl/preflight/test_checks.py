"""The preflight reports everything that prevents a run, all at once, before it starts."""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from search_r1.agent.generation import build_environment
from tests.bad_models import entry, whole_model
from tests.checkpoints import writing
from verl import seams
from verl.config import Config, cli
from verl.errors import PreflightError
from verl.ext.lora.adapter import record_of_peft_config
from verl.ext.lora.model import peft_config
from verl.model_files import weights_fingerprint
from verl.preflight import checks
from verl.preflight.undecided import undecided
from verl.training.loading import load_causal_lm
from verl.training.shards import RECORDS_FILE

ROW = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "q"}],
    "reward_model": {"ground_truth": {"target": ["a"]}},
}


def preflight(config: Config) -> Config:
    """Run the checks of a run with its own tools."""
    return checks.preflight(config, build_environment(config))


@contextmanager
def server(routes: dict[str, tuple[int, str]]) -> Iterator[str]:
    """Start a retriever that answers by path, and 404 elsewhere; yield the address of /retrieve."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = routes.get(self.path, (404, "none"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *args: object) -> None:
            """Silent."""

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/retrieve"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


@pytest.fixture(autouse=True)
def no_cluster_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use neither a Ray cluster nor the hub."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def valid_run(tmp_path: Path) -> list[str]:
    """Return overrides of a run that may start."""
    whole_model(tmp_path / "model", max_shard_size=1_000_000)
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(ROW) + "\n") * 4)
    return [
        f"data.train_files={tmp_path}/train.jsonl",
        f"data.val_files={tmp_path}/val.jsonl",
        f"actor_rollout_ref.model.path={tmp_path}/model",
        f"trainer.default_local_dir={tmp_path}/runs/x",
        "data.train_batch_size=4",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "retriever.url=empty",
    ]


def problems(config: Config) -> list[str]:
    """Return the lines of the error that preflight raises."""
    with pytest.raises(PreflightError) as caught:
        preflight(config)
    return [str(problem) for problem in caught.value.problems]


def test_a_valid_run_passes(valid_run: list[str], tmp_path: Path) -> None:
    """The run may start, and preflight leaves nothing behind."""
    preflight(cli.compose(valid_run))
    assert not (tmp_path / "runs").exists()


def test_options_left_to_the_machine_are_decided(valid_run: list[str], tmp_path: Path) -> None:
    """The options with which a run continues have no null offload option."""
    options = cli.compose(valid_run)
    config = preflight(options)
    assert undecided(options) and undecided(config) == []
    assert "_offload: null" not in cli.write_resolved(config, tmp_path / "runs").read_text()


def test_parts_that_were_deleted_are_left_out(
    valid_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the planner of memory, nothing is offloaded and no option stays null."""
    monkeypatch.setattr(seams, "PLANNERS", ("verl.ext.deleted",))
    monkeypatch.setattr(seams, "CHECKS", ("verl.ext.deleted", "verl.deleted.part"))
    config = preflight(cli.compose(valid_run))
    assert undecided(config) == []
    assert not config.actor_rollout_ref.actor.fsdp_config.param_offload


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor_rollout_ref.model.path=/nowhere/model", "/nowhere/model (no such folder)"),
        ("actor_rollout_ref.model.path=nobody/nothing", "hf download nobody/nothing"),
        ("actor_rollout_ref.model.path=a--b", "no hub name"),
        ("critic.model.path=./nowhere", "critic.model.path: got ./nowhere"),
        ("data.val_files=nowhere.parquet", "data.val_files: nowhere.parquet: got no such file"),
        ("data.train_batch_size=5", "data.train_files: got 4 rows"),
        ("data.train_data_num=2", "data.train_files: got 2 rows"),
        ("trainer.nnodes=2", "2 without RAY_ADDRESS"),
        ("trainer.default_local_dir=/dev/null/x", "/dev/null is not writable"),
        ("retriever.url=http://127.0.0.1:9/retrieve", "bash retrieval_launch.sh"),
    ],
)
def test_each_problem_is_reported_on_one_line(
    valid_run: list[str], override: str, expected: str
) -> None:
    """A missing part is one line with got, expected and fix."""
    lines = problems(
        cli.compose([*valid_run, "actor_rollout_ref.actor.ppo_mini_batch_size=256", override])
    )
    assert len(lines) == 1
    assert expected in lines[0]
    assert "expected" in lines[0]
    assert "fix: " in lines[0]
    assert "\n" not in lines[0]


def test_too_many_ranks_for_the_cores_are_refused(valid_run: list[str]) -> None:
    """The number of cores is checked in addition to the memory of the ranks."""
    lines = problems(cli.compose([*valid_run, "trainer.n_gpus_per_node=256"]))
    assert any("256 ranks with no GPU" in line for line in lines)


def test_all_problems_are_reported_at_once(valid_run: list[str]) -> None:
    """A user can fix everything in one go."""
    wrong = [
        "actor_rollout_ref.model.path=/nowhere",
        "data.train_files=/no.parquet",
        "trainer.nnodes=2",
    ]
    assert len(problems(cli.compose([*valid_run, *wrong]))) == 3


def test_too_few_gpus_is_refused(valid_run: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings for more GPUs than exist name both numbers."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    lines = problems(cli.compose([*valid_run, "trainer.device=cuda", "trainer.n_gpus_per_node=8"]))
    assert "got 8 with 2 GPUs here" in lines[0]
    assert "set trainer.n_gpus_per_node=2" in lines[0]


def test_gpus_of_ranks_and_of_engines_add_up(
    valid_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six cards are enough for four ranks, but not with three engines in addition."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 6)
    options = [*valid_run, "trainer.device=cuda", "trainer.n_gpus_per_node=4",
             "trainer.memory_preflight=off"]  # fmt: skip
    preflight(cli.compose([*options, "trainer.rollout_gpus=2"]))
    (line,) = problems(cli.compose([*options, "trainer.rollout_gpus=3"]))
    assert line == (
        "trainer.n_gpus_per_node: got 4 and trainer.rollout_gpus=3 with 6 GPUs here, expected as "
        "many; fix: lower them to 6 together, or leave out trainer.rollout_gpus"
    )


def test_gpus_of_a_separate_critic_add_up(
    valid_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of actor, engines and critic counts."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 6)
    options = [*valid_run, "trainer.device=cuda", "trainer.n_gpus_per_node=2",
             "trainer.rollout_gpus=2",
             "trainer.memory_preflight=off", "algorithm.adv_estimator=gae"]  # fmt: skip
    preflight(cli.compose([*options, "critic.n_gpus_per_node=2"]))
    (line,) = problems(cli.compose([*options, "critic.n_gpus_per_node=3"]))
    assert "got 2 and trainer.rollout_gpus=2 and critic.n_gpus_per_node=3 with 6 GPUs" in line


def test_heads_must_be_divisible_by_the_sequence_parallel_group(valid_run: list[str]) -> None:
    """Groups must divide the query heads in config.json of policy and critic, here 4.

    The tiny model's 2 key-value heads can be repeated.
    """
    key, actor = "ulysses_sequence_parallel_size", "actor_rollout_ref.actor"
    options = [*valid_run, "trainer.n_gpus_per_node=8", "trainer.memory_preflight=off"]
    for size, expected in (
        (8, [(f"{name}.{key}", f"{name}.{key}=4") for name in (actor, "critic")]),
        (4, []),
    ):
        lines = problems(cli.compose([*options, f"{actor}.{key}={size}"]))
        lines = [line for line in lines if "a divisor of the model's 4 attention heads" in line]
        assert [(x.partition(":")[0], x.rpartition("fix: ")[2]) for x in lines] == expected


def test_on_cpu_engines_leave_the_ranks_a_core(valid_run: list[str]) -> None:
    """Engines on all cores would leave none; all but one are accepted."""
    most = len(os.sched_getaffinity(0))
    (line,) = problems(cli.compose([*valid_run, f"trainer.rollout_gpus={most}"]))
    assert f"got {most} of {most} cores here for engines" in line
    if most > 1:
        preflight(cli.compose([*valid_run, f"trainer.rollout_gpus={most - 1}"]))


def test_a_config_of_another_depth_than_the_weights_is_refused(
    valid_run: list[str], tmp_path: Path
) -> None:
    """It would train random layers; checks that need the model are skipped, others still run."""
    entry("config.json", "num_hidden_layers", 4)(tmp_path / "model")
    critic = whole_model(tmp_path / "critic", max_shard_size=1_000_000)
    entry("config.json", "vocab_size", 100)(critic)
    lines = problems(cli.compose([*valid_run, f"critic.model.path={critic}", "data.val_files=/no"]))
    assert lines[0].startswith("actor_rollout_ref.model.path: got ") and len(lines) == 3
    assert "(weights: missing model.layers.2.input_layernorm.weight" in lines[0]
    assert lines[1].startswith("critic.model.path: got ")


def test_model_folder_without_weights_is_refused(valid_run: list[str], tmp_path: Path) -> None:
    """For a half-downloaded model the missing files are named."""
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "no file named model.safetensors" in problems(cli.compose(valid_run))[0]


@pytest.mark.parametrize("section", ["actor_rollout_ref.model", "critic.model"])
def test_layers_that_an_adapter_cannot_act_on_are_refused(
    valid_run: list[str], section: str
) -> None:
    """The message has the unknown names and those that the model has, before any rank starts."""
    adapter = [f"{section}.lora_rank=4", f"{section}.target_modules=[q_proj,query]"]
    (line,) = problems(cli.compose([*valid_run, *adapter]))
    assert f"{section}: target_modules: got query, expected some of" in line
    assert "q_proj" in line and "fix: target_modules=all-linear" in line
    preflight(cli.compose([*valid_run, *adapter[:1]]))


def test_another_base_or_adapter_than_the_checkpoint_s_is_refused(
    valid_run: list[str], tmp_path: Path
) -> None:
    """Rank 8 after 4, no adapter after one, and changed weights are refused before ranks start."""
    valid_run = [*valid_run, "algorithm.adv_estimator=reinforce", "trainer.resume_mode=auto"]
    adapter = [*valid_run, "actor_rollout_ref.model.lora_rank=4"]
    config = cli.compose(adapter)
    lm = load_causal_lm(config.actor_rollout_ref.model.path)
    record = record_of_peft_config(peft_config(lm, config.actor_rollout_ref.model))
    with writing(tmp_path / "runs" / "x", 1) as folder:
        (folder / RECORDS_FILE).write_text(json.dumps({"actor": record}))
    preflight(config)
    record["fingerprint"] = weights_fingerprint(record["base"], "of before 2026-11-30")
    (tmp_path / "runs/x/global_step_1" / RECORDS_FILE).write_text(json.dumps({"actor": record}))
    preflight(config)
    for wrong in ([*valid_run, "actor_rollout_ref.model.lora_rank=8"], valid_run):
        assert "the checkpoint's" in problems(cli.compose(wrong))[0]
        assert "lora_rank=4" in problems(cli.compose(wrong))[0]
    preflight(cli.compose([*valid_run, "trainer.resume_mode=disable"]))
    whole_model(tmp_path / "model", max_shard_size=1_000_000, seed=1)
    assert "fingerprint" in problems(cli.compose(adapter))[0]


def test_hub_is_asked_for_a_name(valid_run: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it answers about a name that it does not know is reported."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    config = cli.compose([*valid_run, "actor_rollout_ref.model.path=nobody/nothing"])
    with server({"/api/models/nobody/nothing": (404, "{}")}) as url:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url.removesuffix("/retrieve"))
        assert "the hub says 404" in problems(config)[0]


@pytest.mark.parametrize("section", ["actor_rollout_ref.model", "critic.model"])
def test_a_quantized_model_is_refused(valid_run: list[str], tmp_path: Path, section: str) -> None:
    """Policy (which is the reference too) and critic, before their weights are read."""
    folder = whole_model(tmp_path / "quantized", max_shard_size=1_000_000)
    entry("config.json", "quantization_config", {"quant_method": "awq", "bits": 4})(folder)
    options = [f"{section}.path={folder}", "algorithm.adv_estimator=gae"]
    lines = problems(cli.compose([*valid_run, *options]))
    assert len(lines) == 1 and lines[0].startswith(f"{section}.path: got {folder}, whose weights")


def test_a_quantized_model_of_the_hub_is_refused(
    valid_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the hub says of its config, before it is downloaded."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    config = cli.compose([*valid_run, "actor_rollout_ref.model.path=nobody/nothing"])
    answer = json.dumps({"config": {"quantization_config": {"quant_method": "gptq", "bits": 4}}})
    with server({"/api/models/nobody/nothing": (200, answer)}) as url:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url.removesuffix("/retrieve"))
        assert "quantized (gptq)" in problems(config)[0]


def test_a_folder_below_one_that_may_not_be_entered_is_refused(
    valid_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses to look for it, which is a problem of the preflight, not an exception."""
    closed = tmp_path / "closed"
    closed.mkdir()
    stat, access = os.stat, os.access

    def refusing(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{closed}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", refusing)
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed and access(path, mode))
    config = cli.compose([*valid_run, f"trainer.default_local_dir={closed}/run"])
    assert f"({closed} is not writable)" in problems(config)[0]


def test_full_disk_is_refused(valid_run: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that could not save is refused; one that never saves may start."""
    usage = shutil.disk_usage("/")._replace(free=1 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert "GiB free" in problems(cli.compose(valid_run))[0]
    preflight(cli.compose([*valid_run, "trainer.save_freq=0"]))


def test_a_checkpoint_needs_space_for_the_trained_models(
    valid_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times the weights of policy and critic; with adapters only, the exported model."""
    usage = shutil.disk_usage("/")._replace(free=20 << 30)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    monkeypatch.setattr("verl.preflight.machine.weight_bytes", lambda path: 15 << 30)
    adapter, grpo = "actor_rollout_ref.model.lora_rank=4", "algorithm.adv_estimator=reinforce"
    for more, expected in (([], "90.0"), ([grpo], "45.0"), ([adapter], "45.0")):
        line = problems(cli.compose([*valid_run, *more]))[0]
        assert f"expected {expected} GiB for a checkpoint" in line
    preflight(cli.compose([*valid_run, adapter, grpo]))
    preflight(cli.compose([*valid_run, adapter, "critic.model.lora_rank=4"]))


def test_a_malformed_row_is_reported_with_its_number(valid_run: list[str], tmp_path: Path) -> None:
    """A bad row is found before models load."""
    (tmp_path / "val.jsonl").write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "prompt": 3}))
    assert "row 1 (counted from 0), prompt: got 3" in problems(cli.compose(valid_run))[0]


def test_a_run_without_search_needs_no_retriever(valid_run: list[str]) -> None:
    """With `do_search=false` no server is checked."""
    preflight(
        cli.compose([*valid_run, "do_search=false", "retriever.url=http://127.0.0.1:9/retrieve"])
    )


def test_every_retriever_of_several_is_probed(valid_run: list[str]) -> None:
    """Of several addresses only the one that does not answer is reported."""
    with server({"/retrieve": (200, '{"result": [[]]}')}) as url:
        several = f'retriever.url="{url}, http://127.0.0.1:9/retrieve"'
        [problem] = problems(cli.compose([*valid_run, several]))
    assert "retriever.url=http://127.0.0.1:9/retrieve" in problem


def test_a_folder_named_like_a_tracker_is_no_package(
    valid_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An offline run of wandb leaves such a folder; wandb itself may not be installed."""
    (tmp_path / "swanlab_of_old").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("verl.monitor.tracking.LIBRARIES", ("swanlab_of_old",))
    config = cli.compose(valid_run)
    config.trainer.logger = ["swanlab_of_old"]
    assert "swanlab_of_old, not installed" in problems(config)[0]
