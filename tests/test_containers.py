"""Container files: what they name exists. How the image was built: docs/evidence/walk.md."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from scripts.install import choose_wheels

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
GPU: dict[str, Any] = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text(encoding="utf-8"))


def test_the_image_installs_the_builds_that_the_installer_knows() -> None:
    """Its default is the CPU build; the other is that of compose.gpu.yaml."""
    joined = DOCKERFILE.replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in joined.splitlines() if line and line[0] != "#"]
    names = [name for name, _ in steps]
    assert names[0] == "FROM" and set(names) <= {"FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN",
                                                "USER", "VOLUME", "EXPOSE", "CMD"}  # fmt: skip
    assert dict(steps)["ARG"] == "BUILD=--cpu" and "${BUILD}" in dict(steps)["RUN"]
    assert (ROOT / dict(steps)["RUN"].split()[1]).is_file()
    assert (ROOT / json.loads(dict(steps)["CMD"])[1]).is_file()
    given = re.findall(r"(?:install -d -o|chown) trainer ([^&]*)", dict(steps)["RUN"])
    owned = {path for paths in given for path in paths.split()}
    # Without an INDEX_PATH, the retriever writes its index beside the example's corpus.
    assert owned == {"/data", "/app", "/app/runs", "/app/models", "/app/example"}
    flag, default = GPU["services"]["retriever"]["build"]["args"]["BUILD"].split()
    cuda = re.fullmatch(r"\$\{CUDA:-(\d+)\}", default)
    assert flag == "--cuda" and cuda and choose_wheels(False, int(cuda[1]))[0]


def test_the_trainer_waits_for_the_retriever_that_it_asks() -> None:
    """By the address at which the retriever's service listens."""
    services = COMPOSE["services"]
    retriever, trainer = services["retriever"], services["trainer"]
    assert trainer["depends_on"] == {"retriever": {"condition": "service_healthy"}}
    assert trainer["environment"]["RETRIEVER_URL"] == "http://retriever:8000/retrieve"
    assert (
        retriever["environment"]["HOST"] == "0.0.0.0"
        and "/health" in retriever["healthcheck"]["test"][-1]
    )
    scripts = "".join((ROOT / name).read_text() for name in ("retrieval_launch.sh", "train_grpo.sh",
                                                            "scripts/train_common.sh"))  # fmt: skip
    for service in (retriever, trainer):
        assert (ROOT / service["command"][1]).is_file()
        assert all(f"${{{name}" in scripts for name in service["environment"]), service
    assert GPU["services"].keys() == services.keys()


def test_the_development_container_uses_the_same_image() -> None:
    """Its sources are mounted where the image has installed them."""
    content = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert (ROOT / ".devcontainer" / content["build"]["dockerfile"]).is_file()
    assert f"WORKDIR {content['workspaceFolder']}\n" in DOCKERFILE
    venv = content["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert shlex.split(venv)[0].startswith("/opt/venv/") and "install.py /opt/venv" in DOCKERFILE
