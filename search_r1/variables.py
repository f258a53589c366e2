"""The environment variables that our programs read, and a warning about names that nearly are one.

`BASE_MODLE=… bash train_grpo.sh` would train another model without a word, since nothing reads an
unknown variable. The recipes' scripts and the commands call this at their start. Needs no torch.
"""

import difflib
import functools
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


RECIPES = _names("""
    ACTOR_LR ACTOR_WARMUP ASYNC BASE_MODEL CORPUS_PATH CRITIC_LORA_RANK CRITIC_LR
    CRITIC_MAX_TOKENS_PER_GPU CRITIC_MICRO_BATCH_SIZE CRITIC_MODEL CRITIC_WARMUP CRITIC_WARMUP_STEPS
    DATA_DIR ENTRY EXPERIMENT_NAME FAULTS GAMMA GPU_MEMORY_UTILIZATION GPU_WHEELS
    GRADIENT_CHECKPOINTING HOST INDEX_PATH INSTALL_ARGS KL_COEF LAM LOGGER LORA_ALPHA LORA_RANK
    MAX_OBS_LENGTH MAX_PROMPT_LENGTH MAX_RESPONSE_LENGTH MAX_START_LENGTH MAX_TOKENS_PER_GPU
    MAX_TURNS METHOD MICRO_BATCH_SIZE MINI_BATCH_SIZE N_AGENT N_GPUS N_NODES OFFLOAD OUT OUTPUT_DIR
    PORT PRESET PROJECT_NAME PYTHON REF_OFFLOAD RETRIEVER_MODEL RETRIEVER_NAME RETRIEVER_URL
    ROLLOUT_GPUS SAVE_FREQ SEED STALENESS STATE_MASKING TEMPERATURE TENSOR_PARALLEL TEST_FREQ
    TEST_WORKERS TOPK TOTAL_STEPS TRAIN_BATCH_SIZE TRAIN_DATA_NUM TRAIN_FILES USE_KL_LOSS
    VAL_BATCH_SIZE VAL_DATA_NUM VAL_FILES
""")
"""Variables of the shell scripts for training, the retriever and evaluation, and of make."""
SLURM = _names("""
    ACCOUNT ALGO CHECK_FILES CONDA_ENV CPUS DRY_RUN GPUS GRACE LOG_DIR MAX_IDLE_STARTS MAX_REQUEUES
    MEM MODULES NODES PARTITION QOS RAY_TMP RAY_WAIT RECIPE REQUEUE_ON RETRIEVER_ARGS RETRIEVER_FILE
    RETRIEVER_NODES RETRIEVER_OPEN RETRIEVER_PORT RETRIEVER_PYTHON RETRIEVER_WAIT SBATCH_ARGS SETUP
    TIME TRAINER_MEM VENV WARNING
""")
"""Variables of the recipes for Slurm (scripts/slurm/example.conf)."""
PROGRAMS = _names("""
    AGENT_TOKEN BRAVE_API_KEY GOOGLE_API_KEY GOOGLE_CSE_ID INDEX_TOKEN OPENAI_API_KEY
    PAGE_SUMMARY_API_KEY RETRIEVER_TOKEN SANDBOX_URL SERPAPI_API_KEY SERPER_API_KEY TAVILY_API_KEY
    VIEW_TOKEN
""")
"""Keys and tokens that our programs read; options such as `judge.api_key_env` may name others."""
LIBRARIES = _names("""
    ALL_PROXY CUDA_VISIBLE_DEVICES GLIBC_TUNABLES GOMP_SPINCOUNT HF_ASSETS_CACHE HF_DATASETS_CACHE
    HF_DATASETS_OFFLINE HF_DEBUG HF_ENDPOINT HF_HOME HF_HUB_CACHE HF_HUB_DISABLE_IMPLICIT_TOKEN
    HF_HUB_DISABLE_PROGRESS_BARS HF_HUB_DISABLE_SYMLINKS_WARNING HF_HUB_DISABLE_TELEMETRY
    HF_HUB_DISABLE_XET HF_HUB_DOWNLOAD_TIMEOUT HF_HUB_ETAG_TIMEOUT HF_HUB_OFFLINE HF_HUB_VERBOSITY
    HF_MODULES_CACHE HF_STORED_TOKENS_PATH HF_TOKEN HF_TOKEN_PATH HF_XET_CACHE
    HF_XET_HIGH_PERFORMANCE HTTPS_PROXY HTTP_PROXY HUGGING_FACE_HUB_TOKEN JAVA_HOME
    LD_PRELOAD MLFLOW_HTTP_REQUEST_MAX_RETRIES MLFLOW_HTTP_REQUEST_TIMEOUT
    MLFLOW_TRACKING_URI NO_PROXY OMP_NUM_THREADS OMP_WAIT_POLICY PYTORCH_ALLOC_CONF
    PYTORCH_CUDA_ALLOC_CONF RAY_ADDRESS RAY_TMPDIR
    RAY_memory_usage_threshold RAY_worker_niceness SWANLAB_API_KEY SWANLAB_LOG_DIR
    SWANLAB_MODE SWANLAB_SAVE_DIR TRACKIO_DIR VLLM_BATCH_INVARIANT
    VLLM_RPC_BASE_PATH VLLM_WORKER_MULTIPROC_METHOD WANDB_DIR WANDB_MODE WANDB_RUN_ID
""")
"""Variables of libraries and tools that we read, too, and that people set."""
SET_BY_PROGRAMS = _names("""
    CC CONDA_EXE DEMO_RETRIEVER_PID LOCAL_RANK LOCAL_WORLD_SIZE PATH PROMETHEUS_MULTIPROC_DIR
    PYTHONPATH RANK
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO RAY_JOB_CONFIG_JSON_ENV_VAR RAY_USAGE_STATS_ENABLED SEARCH_R1
    SEARCH_R1_JOB SEARCH_R1_PART SEARCH_R1_RUN SEARCH_R1_TRUST_REMOTE_CODE SLURM_CPUS_ON_NODE
    SLURM_CPUS_PER_TASK SLURM_DIR SLURM_GPUS_ON_NODE SLURM_JOB_END_TIME SLURM_JOB_ID
    SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_RESTART_COUNT SLURM_SUBMIT_DIR TMPDIR
    TORCH_NCCL_ASYNC_ERROR_HANDLING TORCHELASTIC_RUN_ID WORLD_SIZE XDG_RUNTIME_DIR
""")
"""Variables that we read and that systems or our own programs set."""
TYPED = RECIPES | SLURM | PROGRAMS | LIBRARIES
"""Variables that people type, and so misspell."""
KNOWN = TYPED | SET_BY_PROGRAMS
MIN_LENGTH = 6
"""Shorter names are similar to many that mean something else (`NODE`, `HOSTS`)."""
SIMILARITY = 0.86
"""Smallest ratio of `difflib` between a misspelt name and ours."""
MAX_CHANGES = 3
"""Letters by which a misspelt name may be longer or shorter, or have that ours lacks."""


def near_misses(names: Iterable[str]) -> dict[str, str]:
    """Return, for each of `names` that is nearly a variable of ours, that variable.

    Both begin with the same letter; case and underscores do not count (`base_model`, `NGPUS`).
    """
    found = {}
    for name in names:
        if name in KNOWN or name.endswith("_proxy"):  # read like those in capitals
            continue
        key = _key(name)
        similar = ((_similarity(key, _key(known)), known) for known in _by_letter()[key[:1]])
        similarity, known = max(similar, default=(0.0, ""))
        if similarity >= SIMILARITY:
            found[name] = known
    return found


@functools.cache  # a command may call another one
def warn_of_near_misses() -> None:
    """Print a line for each set variable that is nearly one of ours; once in a process."""
    for name, known in near_misses(os.environ).items():
        sys.stderr.write(
            f"warning: got the environment variable {name}, which no program of this project "
            f"reads; did you mean {known}?\n"
        )


@functools.cache
def _by_letter() -> Mapping[str, list[str]]:
    """Return the names that are long enough to recognise, by their first letter."""
    names = defaultdict[str, list[str]](list)
    for name in sorted(TYPED):
        if len(name) >= MIN_LENGTH:
            names[_key(name)[0]].append(name)
    return names


@functools.cache
def _key(name: str) -> str:
    return name.replace("_", "").casefold()


def _similarity(key: str, known: str) -> float:
    """Return the ratio of `difflib`, or 1 if the letters are the same in another order."""
    # Both filters are cheap, and a name that fails one has no such ratio or is another word.
    if abs(len(key) - len(known)) > MAX_CHANGES or len({*key} ^ {*known}) > MAX_CHANGES:
        return 0.0
    if sorted(key) == sorted(known):  # a short name with two letters swapped has a low ratio
        return 1.0
    matcher = difflib.SequenceMatcher(None, key, known, autojunk=False)
    return matcher.ratio() if matcher.quick_ratio() >= SIMILARITY else 0.0
