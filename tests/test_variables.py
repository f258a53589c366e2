"""The environment variables of our programs: the list is complete, and misspelt names are told."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from search_r1 import cli, infer
from search_r1.online.services import SERVICES
from search_r1.variables import KNOWN, LIBRARIES, near_misses, warn_of_near_misses
from verl.training.network import HUB, PRIVATE

ROOT = Path(__file__).resolve().parents[1]
SHELL = [*ROOT.glob("*.sh"), *(ROOT / "scripts").rglob("*.sh"), *ROOT.glob("scripts/slurm/*")]
OF_THE_SHELL = {"PWD", "SECONDS", "BASH_SOURCE", "BASH_REMATCH", "HOME", "USER"}
USED = re.compile(r"(?<!\\)\$\{?([A-Z]\w*)")
SETTINGS = re.compile(r"^#?([A-Z][A-Z0-9_]+)=", re.MULTILINE)
OVERRIDABLE = re.compile(r"^([A-Z][A-Z0-9_]+) *\?=|\$\((INSTALL_ARGS)\)", re.MULTILINE)
CONSTANT = re.compile(r'^([A-Z_]+) = "([A-Za-z0-9_]+)"$', re.MULTILINE)
READERS = ("get", "setdefault", "pop", "getenv")


def shell_variables() -> set[str]:
    """Return the variables that scripts use and settings files and the Makefile offer."""
    texts = [path.read_text() for path in SHELL if path.suffix != ".md" and path.is_file()]
    found = {name for text in texts for name in USED.findall(text)}
    found |= set(SETTINGS.findall((ROOT / "scripts/slurm/example.conf").read_text()))
    for pair in OVERRIDABLE.findall((ROOT / "Makefile").read_text()):
        found |= {*filter(None, pair)}
    return found - OF_THE_SHELL


def python_variables() -> set[str]:
    """Return the variables that Python code reads by a constant name."""
    texts = [path.read_text() for folder in ("verl", "search_r1", "scripts", "example")
             for path in (ROOT / folder).rglob("*.py")]  # fmt: skip
    constants = defaultdict[str, set[str]](set)
    for name, value in (pair for text in texts for pair in CONSTANT.findall(text)):
        constants[name].add(value)
    found = set[str]()
    for text in (text for text in texts if "environ" in text):
        for node in names_read(ast.parse(text)):
            found |= constants[node.id] if isinstance(node, ast.Name) else {str(node.value)}
    return found


def names_read(tree: ast.Module) -> Iterator[ast.Constant | ast.Name]:
    """Yield the expressions by which a module names variables of the environment."""
    for node in ast.walk(tree):
        name: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            is_read = node.func.attr in READERS and is_environment(node.func.value)
            name = node.args[0] if is_read else None
        elif isinstance(node, ast.Subscript) and is_environment(node.value):
            name = node.slice
        elif isinstance(node, ast.Compare) and is_environment(node.comparators[0]):
            name = node.left
        if isinstance(name, ast.Constant | ast.Name):
            yield name


def is_environment(node: ast.expr) -> bool:
    return ast.unparse(node).split(".")[-1] in ("environ", "os")


def test_the_list_has_every_variable_that_is_read() -> None:
    """Scripts, settings, Makefile, Python code, the hub's and the search services' variables."""
    services = {name for service in SERVICES.values() for name in service.variables}
    read = shell_variables() | python_variables() | services
    assert {"BASE_MODEL", "RETRIEVER_TOKEN", "SLURM_JOB_END_TIME", "PARTITION"} <= read
    assert read - KNOWN == set()
    assert HUB | set(PRIVATE) <= LIBRARIES


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("BASE_MODLE", "BASE_MODEL"), ("BASEMODEL", "BASE_MODEL"), ("base_model", "BASE_MODEL"),
        ("BASE_MODELS", "BASE_MODEL"), ("BASE_MODL", "BASE_MODEL"), ("BASE__MODEL", "BASE_MODEL"),
        ("RETREIVER_URL", "RETRIEVER_URL"), ("RETRIEVER_ULR", "RETRIEVER_URL"),
        ("RETRIVER_URL", "RETRIEVER_URL"), ("DATADIR", "DATA_DIR"), ("DATA_DRI", "DATA_DIR"),
        ("EXPERIMENT_NAM", "EXPERIMENT_NAME"), ("EXPIREMENT_NAME", "EXPERIMENT_NAME"),
        ("N_GPU", "N_GPUS"), ("NGPUS", "N_GPUS"), ("N_GPSU", "N_GPUS"), ("NNODES", "N_NODES"),
        ("TOTAL_STEP", "TOTAL_STEPS"), ("MAX_TOKENS_PER_GPUS", "MAX_TOKENS_PER_GPU"),
        ("OFLOAD", "OFFLOAD"), ("PRESETS", "PRESET"), ("TENSOR_PARALEL", "TENSOR_PARALLEL"),
        ("PARTITON", "PARTITION"), ("RETRIEVER_TOKENS", "RETRIEVER_TOKEN"),
        ("CUDA_VISIBLE_DEVICE", "CUDA_VISIBLE_DEVICES"), ("WANDB_MOD", "WANDB_MODE"),
        ("RAY_WORKER_NICENESS", "RAY_worker_niceness"), ("omp_num_threads", "OMP_NUM_THREADS"),
        ("TRAIN_BATCHSIZE", "TRAIN_BATCH_SIZE"), ("TRAIN_FILE", "TRAIN_FILES"),
    ],
)  # fmt: skip
def test_a_misspelt_name_is_recognised(name: str, meant: str) -> None:
    """Swapped, missing, doubled and added letters; other case; other underscores."""
    assert near_misses([name]) == {name: meant}


COMMON = """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE LC_ALL LC_CTYPE TERM COLORTERM PWD OLDPWD SHLVL
    HOSTNAME HOST HOSTTYPE MACHTYPE OSTYPE EDITOR VISUAL PAGER MAIL DISPLAY WAYLAND_DISPLAY
    XAUTHORITY SSH_AUTH_SOCK SSH_CLIENT SSH_TTY TMUX TMUX_PANE TEMP TMP TMPDIR TZ LS_COLORS LESSOPEN
    DBUS_SESSION_BUS_ADDRESS XDG_DATA_DIRS XDG_CONFIG_DIRS XDG_RUNTIME_DIR XDG_SESSION_ID
    XDG_CACHE_HOME XDG_DATA_HOME GPG_TTY DESKTOP_SESSION GDMSESSION GTK_MODULES QT_ACCESSIBILITY
    WINDOWID VIRTUAL_ENV VIRTUAL_ENV_PROMPT PYTHONPATH PYTHONHOME PYTHONUNBUFFERED PYTHONHASHSEED
    PYTHONDONTWRITEBYTECODE PYTHONWARNINGS PYTHONUTF8 CONDA_PREFIX CONDA_DEFAULT_ENV CONDA_SHLVL
    CONDA_PYTHON_EXE CONDA_ENVS_PATH CONDA_PKGS_DIRS PYENV_ROOT PIP_INDEX_URL PIP_CACHE_DIR
    UV_CACHE_DIR NODE NODE_PATH NODE_ENV npm_config_cache GOPATH JAVA_HOME CC CXX CFLAGS CXXFLAGS
    LDFLAGS MAKEFLAGS MAKELEVEL LD_LIBRARY_PATH LIBRARY_PATH CPATH MANPATH MODULEPATH MODULESHOME
    LOADEDMODULES LMOD_CMD LMOD_DIR CUDA_HOME CUDA_PATH CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING
    CUDA_VERSION NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES NVARCH NCCL_DEBUG
    NCCL_SOCKET_IFNAME NCCL_IB_DISABLE NCCL_P2P_DISABLE GLOO_SOCKET_IFNAME TORCH_HOME
    TORCH_CUDA_ARCH_LIST PYTORCH_CUDA_ALLOC_CONF OMP_NUM_THREADS OMP_PROC_BIND OMP_PLACES
    MKL_NUM_THREADS OPENBLAS_NUM_THREADS NUMEXPR_NUM_THREADS KMP_AFFINITY GOMP_CPU_AFFINITY
    TOKENIZERS_PARALLELISM TRANSFORMERS_CACHE TRANSFORMERS_OFFLINE HF_HOME HF_TOKEN
    HF_HUB_ENABLE_HF_TRANSFER HF_METRICS_CACHE HF_HUB_OFFLINE HF_HUB_DISABLE_EXPERIMENTAL_WARNING
    VLLM_USE_V1 VLLM_LOGGING_LEVEL VLLM_CACHE_ROOT VLLM_ATTENTION_BACKEND VLLM_USE_V2_MODEL_RUNNER
    WANDB_API_KEY WANDB_PROJECT WANDB_ENTITY WANDB_NAME WANDB_RUN_GROUP WANDB_SILENT
    MLFLOW_EXPERIMENT_NAME MLFLOW_RUN_ID RAY_TMPDIR RAY_DEDUP_LOGS RAY_LOG_TO_STDERR
    RAY_GRAFANA_HOST MASTER_ADDR MASTER_PORT RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE
    GROUP_WORLD_SIZE ROLE_WORLD_SIZE TORCHELASTIC_RUN_ID SLURM_JOBID SLURM_JOB_UID SLURM_JOB_GID
    SLURM_JOB_NAME SLURM_JOB_PARTITION SLURM_JOB_ACCOUNT SLURM_JOB_QOS SLURM_JOB_START_TIME
    SLURM_NODELIST SLURM_NNODES SLURM_NTASKS SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_GPUS
    SLURM_MEM_PER_NODE SLURM_CPUS_PER_GPU SLURM_SUBMIT_HOST SBATCH_QOS SBATCH_ACCOUNT
    SBATCH_PARTITION ENVIRONMENT HISTSIZE HISTFILE HISTCONTROL PROMPT_COMMAND PS1 IFS
    KUBERNETES_SERVICE_HOST KUBERNETES_PORT RETRIEVER_SERVICE_HOST RETRIEVER_SERVICE_PORT
    RETRIEVER_PORT_8000_TCP RETRIEVER_PORT_8000_TCP_ADDR http_proxy https_proxy no_proxy all_proxy
    ftp_proxy REQUESTS_CA_BUNDLE SSL_CERT_FILE CURL_CA_BUNDLE AWS_ACCESS_KEY_ID AWS_REGION
    AWS_PROFILE GOOGLE_APPLICATION_CREDENTIALS GOOGLE_CLOUD_PROJECT OPENAI_BASE_URL OPENAI_ORG_ID
    ANTHROPIC_API_KEY GITHUB_ACTIONS GITHUB_TOKEN GITHUB_WORKSPACE CI RUNNER_OS RUNNER_TEMP
    DEBIAN_FRONTEND container DOCKER_HOST INVOCATION_ID JOURNAL_STREAM SYSTEMD_EXEC_PID COLUMNS
    LINES NO_COLOR FORCE_COLOR PYTEST_CURRENT_TEST PYTEST_VERSION PYTEST_XDIST_WORKER TERMINFO
    VTE_VERSION _ EPOCHS DATASET MODEL MODEL_PATH LEARNING_RATE
"""


def test_nothing_is_said_of_ordinary_variables() -> None:
    """Of desktops, Slurm jobs, containers, CI, conda, torchrun and libraries; nor of our own."""
    assert near_misses([*COMMON.split(), *KNOWN]) == {}


@pytest.mark.parametrize(
    "main", [cli.main, lambda words: infer.main(words[1:])], ids=["cli", "module"]
)
def test_commands_name_a_misspelt_variable_once(
    main: Callable[[list[str]], int], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """On standard error, though `search-r1` calls another command."""
    monkeypatch.setenv("BASE_MODLE", "x")
    warn_of_near_misses.cache_clear()
    with pytest.raises(SystemExit):
        main(["infer", "--no-such-flag"])
    assert capsys.readouterr().err.count("did you mean BASE_MODEL?") == 1


def test_a_recipe_names_a_misspelt_variable_and_goes_on(tmp_path: Path) -> None:
    """The script's output and status are those without the variable."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "ENTRY": "platform"}
    plain, misspelt = (
        subprocess.run(["bash", ROOT / "train_grpo.sh"], env=environment | more, cwd=tmp_path,
                       capture_output=True, text=True, timeout=60)
        for more in ({}, {"BASE_MODLE": "x"})
    )  # fmt: skip
    assert misspelt.stderr.count("did you mean BASE_MODEL?") == 1
    assert "BASE_MODEL" not in plain.stderr and plain.returncode == misspelt.returncode == 0
    assert misspelt.stdout == plain.stdout != ""
