"""Models of the hub: described before the checks, and downloaded whole before ranks start."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.bad_models import whole_model
from tests.hub import serving_hub

PROGRAM = """
import json, sys
from pathlib import Path
from huggingface_hub import constants
from search_r1.agent.generation import build_environment
from verl.config import cli
from verl.errors import PreflightError
from verl.preflight import checks, hub_models, models
from verl.ext.memory.check import read_setting
from verl.ext.nodes import fetch_on_node

def weights():
    return sorted(path.name for path in Path(constants.HF_HUB_CACHE).rglob("*.safetensors"))

config = cli.compose(sys.argv[1:])
report = {}
try:
    long = cli.compose([*sys.argv[1:], "data.max_prompt_length=100000"])
    checks.preflight(long, build_environment(long))
except PreflightError as error:
    report["refused"] = [str(problem) for problem in error.problems]
checks.preflight(config, build_environment(config))
report["is_estimated"] = read_setting(config) is not None
report["before"] = weights()
models.fetch_models(config)
report["after"] = weights()
fetch_on_node._function(["org/other"], {})
report["on_node"] = weights()
folder = hub_models.fetch_weights("org/old")
report["old"] = sorted(path.name for path in folder.glob("*.bin"))
print(json.dumps(report))
"""


def test_a_hub_model_is_checked_before_its_weights_are_downloaded(tmp_path: Path) -> None:
    """A context that is too short costs no download; other forms of the model are left there."""
    folder = whole_model(tmp_path / "model", max_shard_size=1_000_000)
    own = {path.name: path.read_bytes() for path in folder.iterdir()}
    files = {f"org/{name}/{file}": data for name in ("tiny", "other") for file, data in own.items()}
    files["org/tiny/original/model.safetensors"] = files["org/tiny/consolidated.safetensors"] = b"x"
    files |= {f"org/old/{name}": b"x" for name in ("config.json", "pytorch_model.bin", "other.bin")}
    row = {"data_source": "nq", "prompt": "q", "reward_model": {"ground_truth": {"target": ["a"]}}}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    options = [
        f"data.train_files={tmp_path}/rows.jsonl", f"data.val_files={tmp_path}/rows.jsonl",
        "actor_rollout_ref.model.path=org/tiny", f"trainer.default_local_dir={tmp_path}/run",
        "data.train_batch_size=4", "trainer.n_gpus_per_node=1", "trainer.device=cpu",
        "retriever.url=empty",
    ]  # fmt: skip
    with serving_hub(files) as url:
        environment = os.environ | {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "cache")}
        for name in ("HF_HUB_OFFLINE", "RAY_ADDRESS"):
            environment.pop(name, None)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *options], env=environment, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    [refused] = report["refused"]
    assert refused.startswith("data.max_prompt_length:")
    assert report["is_estimated"] and report["before"] == []
    assert report["after"] == ["model.safetensors"]
    assert report["on_node"] == 2 * ["model.safetensors"]
    assert report["old"] == ["pytorch_model.bin"]
