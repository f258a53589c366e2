"""What stands in the way of a run is found before it, all at once."""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from search_r1.agent.generation import build_environment
from tests.bad_models import entry, whole_model
from tests.checkpoints import writing
from verl.config import Config, cli
from verl.errors import PreflightError
from verl.preflight import checks
from verl.preflight.memory.check import undecided
from verl.training.lora import Adapter, peft_config
from verl.training.models import load_causal_lm
from verl.training.shards import ADAPTERS_FILE

ROW = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "q"}],
    "reward_model": {"ground_truth": {"target": ["a"]}},
}


def preflight(config: Config) -> Config:
    """The checks of a run with its own tools."""
    return checks.preflight(config, build_environment(config))


@contextmanager
def server(routes: dict[str, tuple[int, str]]) -> Iterator[str]:
    """A retriever that answers by path; 404 elsewhere. Yields the address of /retrieve."""

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
    """Neither a Ray cluster nor the hub is asked."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def sound(tmp_path: Path) -> list[str]:
    """Overrides of a run that may start."""
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
    """The lines of the error that preflight raises."""
    with pytest.raises(PreflightError) as caught:
        preflight(config)
    return [str(problem) for problem in caught.value.problems]


def test_sound_run_passes(sound: list[str], tmp_path: Path) -> None:
    """A run with everything in place starts, and preflight leaves nothing behind."""
    preflight(cli.compose(sound))
    assert not (tmp_path / "runs").exists()


def test_what_is_left_to_the_machine_is_decided(sound: list[str], tmp_path: Path) -> None:
    """The options that a run goes on with, and writes down, have no offload that is null."""
    given = cli.compose(sound)
    config = preflight(given)
    assert undecided(given) and undecided(config) == []
    assert "_offload: null" not in cli.write_resolved(config, tmp_path / "runs").read_text()


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
def test_each_problem_is_told_on_one_line(sound: list[str], override: str, expected: str) -> None:
    """A missing part is one line with got, expected and fix."""
    found = problems(
        cli.compose([*sound, "actor_rollout_ref.actor.ppo_mini_batch_size=256", override])
    )
    assert len(found) == 1
    assert expected in found[0]
    assert "expected" in found[0]
    assert "fix: " in found[0]
    assert "\n" not in found[0]


def test_too_many_ranks_for_the_cores_are_refused(sound: list[str]) -> None:
    """Beside what they would need of memory."""
    found = problems(cli.compose([*sound, "trainer.n_gpus_per_node=256"]))
    assert "256 ranks with no GPU" in found[0]


def test_all_problems_are_told_at_once(sound: list[str]) -> None:
    """A user repairs everything in one go."""
    wrong = [
        "actor_rollout_ref.model.path=/nowhere",
        "data.train_files=/no.parquet",
        "trainer.nnodes=2",
    ]
    assert len(problems(cli.compose([*sound, *wrong]))) == 3


def test_too_few_gpus_is_refused(sound: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings for more GPUs than there are name both numbers."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    found = problems(cli.compose([*sound, "trainer.device=cuda", "trainer.n_gpus_per_node=8"]))
    assert "got 8 with 2 GPUs here" in found[0]
    assert "set trainer.n_gpus_per_node=2" in found[0]


def test_gpus_of_ranks_and_of_engines_add_up(
    sound: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six cards are enough for four ranks, and not for three engines beside them."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 6)
    given = [*sound, "trainer.device=cuda", "trainer.n_gpus_per_node=4",
             "trainer.memory_preflight=off"]  # fmt: skip
    preflight(cli.compose([*given, "trainer.rollout_gpus=2"]))
    (found,) = problems(cli.compose([*given, "trainer.rollout_gpus=3"]))
    assert found == (
        "trainer.n_gpus_per_node: got 4 and trainer.rollout_gpus=3 with 6 GPUs here, expected as "
        "many; fix: lower them to 6 together, or leave out trainer.rollout_gpus"
    )


def test_gpus_of_a_critic_of_its_own_add_up(
    sound: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of actor, engines and critic together; several nodes need a cluster."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 6)
    given = [*sound, "trainer.device=cuda", "trainer.n_gpus_per_node=2", "trainer.rollout_gpus=2",
             "trainer.memory_preflight=off", "algorithm.adv_estimator=gae"]  # fmt: skip
    preflight(cli.compose([*given, "critic.n_gpus_per_node=2"]))
    (found,) = problems(cli.compose([*given, "critic.n_gpus_per_node=3"]))
    assert "got 2 and trainer.rollout_gpus=2 and critic.n_gpus_per_node=3 with 6 GPUs" in found
    (found,) = problems(cli.compose([*given, "critic.n_gpus_per_node=2", "critic.nnodes=2"]))
    assert "critic.nnodes: got 2 without RAY_ADDRESS" in found


def test_ranks_that_compute_together_share_the_heads(sound: list[str]) -> None:
    """Of policy and critic, by their config.json: the tiny model's 4 query heads cannot be divided
    by 8; its 2 key-value heads can be repeated."""
    key, actor = "ulysses_sequence_parallel_size", "actor_rollout_ref.actor"
    given = [*sound, "trainer.n_gpus_per_node=8", "trainer.memory_preflight=off"]
    for size, expected in (
        (8, [(f"{name}.{key}", f"{name}.{key}=4") for name in (actor, "critic")]),
        (4, []),
    ):
        found = problems(cli.compose([*given, f"{actor}.{key}={size}"]))
        lines = [line for line in found if "a divisor of the model's 4 attention heads" in line]
        assert [(x.partition(":")[0], x.rpartition("fix: ")[2]) for x in lines] == expected


def test_on_cpu_engines_leave_the_ranks_a_core(sound: list[str]) -> None:
    """All cores for engines would leave none; all but one are taken."""
    most = len(os.sched_getaffinity(0))
    (found,) = problems(cli.compose([*sound, f"trainer.rollout_gpus={most}"]))
    assert f"got {most} of {most} cores here for engines" in found
    if most > 1:
        preflight(cli.compose([*sound, f"trainer.rollout_gpus={most - 1}"]))


def test_a_config_of_another_depth_than_the_weights_is_refused(
    sound: list[str], tmp_path: Path
) -> None:
    """It would train random layers; what needs the model is not looked at, the rest is."""
    entry("config.json", "num_hidden_layers", 4)(tmp_path / "model")
    critic = whole_model(tmp_path / "critic", max_shard_size=1_000_000)
    entry("config.json", "vocab_size", 100)(critic)
    found = problems(cli.compose([*sound, f"critic.model.path={critic}", "data.val_files=/no"]))
    assert found[0].startswith("actor_rollout_ref.model.path: got ") and len(found) == 3
    assert "(weights: missing model.layers.2.input_layernorm.weight" in found[0]
    assert found[1].startswith("critic.model.path: got ")


def test_model_folder_without_weights_is_refused(sound: list[str], tmp_path: Path) -> None:
    """A half-downloaded model says what is missing."""
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "no file named model.safetensors" in problems(cli.compose(sound))[0]


@pytest.mark.parametrize("section", ["actor_rollout_ref.model", "critic.model"])
def test_layers_that_an_adapter_cannot_act_on_are_refused(sound: list[str], section: str) -> None:
    """Unknown names are told with those that the model has, before any rank starts."""
    adapter = [f"{section}.lora_rank=4", f"{section}.target_modules=[q_proj,query]"]
    (found,) = problems(cli.compose([*sound, *adapter]))
    assert f"{section}: target_modules: got query, expected some of" in found
    assert "q_proj" in found and "fix: target_modules=all-linear" in found
    preflight(cli.compose([*sound, *adapter[:1]]))


def test_another_base_or_adapter_than_the_checkpoint_s_is_refused(
    sound: list[str], tmp_path: Path
) -> None:
    """Before ranks start: rank 8 after rank 4, no adapter after one, and changed weights."""
    sound = [*sound, "algorithm.adv_estimator=reinforce", "trainer.resume_mode=auto"]
    adapter = [*sound, "actor_rollout_ref.model.lora_rank=4"]
    config = cli.compose(adapter)
    lm = load_causal_lm(config.actor_rollout_ref.model.path)
    record = Adapter(peft_config(lm, config.actor_rollout_ref.model), {}).adapter_record()
    with writing(tmp_path / "runs" / "x", 1) as folder:
        (folder / ADAPTERS_FILE).write_text(json.dumps({"actor": record}))
    preflight(config)
    for wrong in ([*sound, "actor_rollout_ref.model.lora_rank=8"], sound):
        assert "the checkpoint's" in problems(cli.compose(wrong))[0]
        assert "lora_rank=4" in problems(cli.compose(wrong))[0]
    preflight(cli.compose([*sound, "trainer.resume_mode=disable"]))
    whole_model(tmp_path / "model", max_shard_size=1_000_000, seed=1)
    assert "fingerprint" in problems(cli.compose(adapter))[0]


@pytest.mark.parametrize(("status", "found"), [(200, ""), (404, "the hub says 404")])
def test_hub_is_asked_for_a_name(
    sound: list[str], monkeypatch: pytest.MonkeyPatch, status: int, found: str
) -> None:
    """A hub name passes when the hub knows it, and else says what the hub said."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    config = cli.compose([*sound, "actor_rollout_ref.model.path=nobody/nothing"])
    with server({"/api/models/nobody/nothing": (status, "{}")}) as url:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url.removesuffix("/retrieve"))
        if not found:
            preflight(config)
        else:
            assert found in problems(config)[0]


def test_full_disk_is_refused(sound: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No run starts that could not save; one that never saves may."""
    usage = shutil.disk_usage("/")._replace(free=1 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert "GiB free" in problems(cli.compose(sound))[0]
    preflight(cli.compose([*sound, "trainer.save_freq=0"]))


def test_a_checkpoint_needs_room_for_what_is_trained(
    sound: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times the weights of policy and critic; of adapters alone, one model for the end."""
    usage = shutil.disk_usage("/")._replace(free=20 << 30)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    monkeypatch.setattr("verl.preflight.checks.weight_bytes", lambda path: 15 << 30)
    adapter, grpo = "actor_rollout_ref.model.lora_rank=4", "algorithm.adv_estimator=reinforce"
    for more, expected in (([], "90.0"), ([grpo], "45.0"), ([adapter], "45.0")):
        told = problems(cli.compose([*sound, *more]))[0]
        assert f"expected {expected} GiB for a checkpoint" in told
    preflight(cli.compose([*sound, adapter, grpo]))
    preflight(cli.compose([*sound, adapter, "critic.model.lora_rank=4"]))


def test_malformed_row_is_told_with_its_number(sound: list[str], tmp_path: Path) -> None:
    """A bad row is found before models load."""
    (tmp_path / "val.jsonl").write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "prompt": 3}))
    assert "row 1 (counted from 0), prompt: got 3" in problems(cli.compose(sound))[0]


def test_run_without_search_asks_no_retriever(sound: list[str]) -> None:
    """`do_search=false` needs no server."""
    preflight(cli.compose([*sound, "do_search=false", "retriever.url=http://127.0.0.1:9/retrieve"]))


def test_every_retriever_of_several_is_probed(sound: list[str]) -> None:
    """Of several addresses only the one that does not answer is told."""
    with server({"/retrieve": (200, '{"result": [[]]}')}) as url:
        several = f'retriever.url="{url}, http://127.0.0.1:9/retrieve"'
        [problem] = problems(cli.compose([*sound, several]))
    assert "retriever.url=http://127.0.0.1:9/retrieve" in problem


def test_a_folder_named_like_a_tracker_is_no_package(
    sound: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An offline run of wandb left one where the next run is started, without wandb installed."""
    (tmp_path / "swanlab_of_old").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("verl.preflight.checks.PACKAGES", ("swanlab_of_old",))
    config = cli.compose(sound)
    config.trainer.logger = ["swanlab_of_old"]
    assert "swanlab_of_old, not installed" in problems(config)[0]
