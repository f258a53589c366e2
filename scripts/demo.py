"""`make demo`: trains a small language model to search and writes a report, in one command.

It starts a retriever over the example world, warm-starts SmolLM2-135M-Instruct with a few
supervised steps, trains it with the recipe's own `train_grpo.sh` or `train_ppo.sh` and the
example's settings, evaluates it at the end once more without documents, and writes `summary.json`
and `report.md`. A page shows the curve while it grows. The demo uses one GPU if there is one,
otherwise the CPU. All processes that it starts are stopped at the end, also after an error.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from scripts import demo_texts
from scripts.demo_hooks import SERVER_VARIABLE
from scripts.demo_report import write_report
from scripts.processes import run
from search_r1.retrieval.errors import RetrieverUnavailable
from search_r1.retrieval.local_server import LocalServer
from verl.errors import ResourceError, explain
from verl.nvidia import vllm_device

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
TEMPLATE = "short"

EXAMPLE = ROOT / "example"
CHINESE = [
    f"template={EXAMPLE / 'chinese.yaml'}",
    # Chinese takes SmolLM2 two tokens and more for a character.
    "data.max_prompt_length=512",
    "data.max_response_length=72",
]
HARD = [
    "max_turns=4",  # three searches, and one to spare
    "retriever.topk=2",  # both of two documents that differ
    "data.max_prompt_length=640",
    "data.max_obs_length=128",
    # Seven kinds of questions instead of two take longer to learn.
    "trainer.total_training_steps=44",
    "trainer.test_freq=22",
]
WORLDS: dict[str, tuple[str, Sequence[str]]] = {
    "en": ("", ()),
    "zh": ("example.chinese", CHINESE),
    "hard": ("example.hard", HARD),
}
"""The module that writes each world, none for the committed one, and its further options."""
SFT_OPTIONS = ["steps=20", "batch_size=8", "lr=2e-4", "schedule=linear", "shuffle=false"]
HOOKS = ROOT / "scripts" / "demo_hooks.py"
ON_DEVICE = {
    "cpu": ["trainer.device=cpu"],
    "cuda": [
        "trainer.device=cuda",
        # The trainer needs little of the card; a display or another job may use some of it too.
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        # The engine runs for a few minutes: compilation and graphs would not pay off.
        "actor_rollout_ref.rollout.engine_kwargs.enforce_eager=true",
    ],
}
COMMON = [
    "trainer.n_gpus_per_node=1",
    "trainer.logger=[console,jsonl]",
    "trainer.save_freq=-1",
    "trainer.test_freq=11",  # a validation takes as long as two steps
    "trainer.guard.action=off",  # its forward passes take a tenth of a step
    f"template={TEMPLATE}",
    "max_turns=3",
    "retriever.topk=1",
    "data.max_start_length=160",
    "data.max_prompt_length=384",
    "data.max_response_length=48",
    "data.max_obs_length=96",
    "data.val_batch_size=128",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
    "actor_rollout_ref.actor.optim.lr=3e-5",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0",
    "actor_rollout_ref.actor.use_kl_loss=false",
    "actor_rollout_ref.rollout.max_num_seqs=128",
    "algorithm.kl_ctrl.kl_coef=0",
]
OPTIONS = {
    "grpo": [
        *COMMON,
        "data.train_batch_size=6",
        "actor_rollout_ref.rollout.n_agent=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=36",
        "trainer.total_training_steps=22",
    ],
    "ppo": [
        *COMMON,
        "data.train_batch_size=36",
        "actor_rollout_ref.rollout.n_agent=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=36",
        "critic.optim.lr=3e-5",
        "critic.model.enable_gradient_checkpointing=false",
        "trainer.total_training_steps=16",
    ],
}


def choose_device(requested: str, has_card: bool, installed: str) -> str:
    """Return cpu or cuda; `installed` is the device of vLLM's build.

    Raises ResourceError if cuda has no card, or if vLLM's build is for the other device.
    """
    device = ("cuda" if has_card else "cpu") if requested == "auto" else requested
    if device == "cuda" and not has_card:
        got, expected = "cuda without a GPU that torch sees", "a GPU"
        raise ResourceError(explain("--device", got, expected, "python -m verl.doctor says why"))
    if installed != device:
        got = f"{device} with vLLM's {installed} build" if installed else "no vLLM"
        expected = f"vLLM's {device} build"
        raise ResourceError(
            explain("--device", got, expected, "docs/start/installation.md installs it")
        )
    return device


def check_staleness(staleness: int, device: str) -> None:
    """Raise ResourceError if the demo cannot sample ahead of training on this device."""
    if staleness and device == "cuda":
        expected = "0: engine and trainer share the one GPU that the demo uses"
        fix = "leave ASYNC out, or train with trainer.rollout_gpus: docs/guides/rollouts.md"
        raise ResourceError(explain("--staleness", staleness, expected, fix))


def bm25_over(corpus: Path) -> list[str]:
    """Return the flags of a retrieval server over a corpus."""
    return ["--retriever_name", "bm25", "--corpus_path", str(corpus)]


@dataclass
class Demo:
    """One run of the demo: its settings, output folder, and the time of each phase."""

    algorithm: str
    seed: int
    device: str
    out: Path
    started_at: float
    extra: Sequence[str] = ()
    staleness: int = 0
    """Number of steps that sampling may be ahead of training."""
    world: str = "en"
    """Corpus, questions and demonstrations: en (the example's), zh (in Chinese) or hard."""
    seconds: dict[str, float] = field(default_factory=dict)
    console: Console = field(default_factory=Console)

    @property
    def data(self) -> Path:
        """The folder with questions and demonstrations."""
        return EXAMPLE / "data" if self.world == "en" else self.out / "data"

    @property
    def corpus(self) -> Path:
        return EXAMPLE / "corpus.jsonl" if self.world == "en" else self.data / "corpus.jsonl"

    @contextlib.contextmanager
    def phase(self, name: str, title: str) -> Iterator[None]:
        """Print the title of a phase and time the body."""
        self.console.rule(f"[bold]{title}")
        start = time.time()
        yield
        self.seconds[name] = time.time() - start

    def python(self, *arguments: str) -> None:
        """Run a Python module to its end; its output goes to the terminal."""
        run([sys.executable, "-m", *arguments], ROOT)

    def run(self) -> None:
        """Run all phases in order and write the report."""
        say = partial(demo_texts.say, self.world)
        self.seconds["install"] = time.time() - self.started_at
        with self.phase("data", say("base model")):
            if not (MODEL / "config.json").exists():
                self.python("example.model", "--out", str(MODEL))
            if writer := WORLDS[self.world][0]:
                self.python(writer, "--out", str(self.data))
        with self.phase("warm_start", say("warm start by supervised fine-tuning")):
            self.warm_start()
        with contextlib.ExitStack() as servers:
            with self.phase("retriever", say("retriever")):
                retriever = LocalServer(bm25_over(self.corpus), log_path=self.out / "retriever.log")
                url = f"{servers.enter_context(retriever).url}/retrieve"
                self.console.print(f"{say('retriever answers at')} {url}")
            with self.phase("train", f"{self.algorithm.upper()} {say('with real searches')}"):
                os.environ[SERVER_VARIABLE] = str(retriever.pid)
                hooks = [f"trainer.hooks=[{HOOKS}:Page,{HOOKS}:WithoutDocuments]"]
                self.train(self.out, url, self.out / "warm_start", hooks)
        wall = time.time() - self.started_at
        write_report(
            self.out, self.algorithm, self.seed, self.seconds, wall, self.console, self.world
        )

    def warm_start(self) -> None:
        """Train a few supervised steps on demonstrations that search too rarely."""
        self.python(
            "verl.trainer.sft", f"model_path={MODEL}",
            f"train_file={self.data / 'sft.jsonl'}",
            f"output_dir={self.out / 'warm_start'}", f"seed={self.seed}",
            f"device={self.device}", *SFT_OPTIONS,
        )  # fmt: skip

    def options(self, out: Path) -> list[str]:
        """Return the training's options: the demo's, then those of its world and device."""
        return [
            f"data.train_files={self.data / 'train.parquet'}",
            f"data.val_files={self.data / 'val.parquet'}",
            f"trainer.default_local_dir={out}",
            f"trainer.seed={self.seed}",
            *OPTIONS[self.algorithm],
            *WORLDS[self.world][1],
            *ON_DEVICE[self.device],
            f"actor_rollout_ref.rollout.max_staleness={self.staleness}",
        ]

    def train(self, out: Path, url: str, model: Path, extra: Sequence[str] = ()) -> None:
        """Run the recipe's script with the example's settings and output folder `out`."""
        environment = {
            **os.environ,
            "PYTHON": sys.executable,
            "BASE_MODEL": str(model),
            "DATA_DIR": str(self.data),
            "RETRIEVER_URL": url,
            "EXPERIMENT_NAME": f"demo-{self.algorithm}",
        }
        options = [*self.options(out), *extra, *self.extra]
        run(["bash", f"train_{self.algorithm}.sh", *options], ROOT, environment)


def fresh_directory(out: Path) -> None:
    """Create an empty folder `out`; the previous one is renamed to `OUT-previous`."""
    if out.exists():
        previous = out.with_name(f"{out.name}-previous")
        shutil.rmtree(previous, ignore_errors=True)
        out.rename(previous)
    out.mkdir(parents=True)


def main() -> None:
    """Run the command line of `make demo`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", choices=sorted(OPTIONS), default="grpo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", choices=WORLDS, default="en", help="corpus and questions")
    parser.add_argument(
        "--staleness", type=int, choices=range(9), default=0, help="steps to sample ahead"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "demo")
    parser.add_argument("--started-at", type=float, default=time.time(), help="Unix time of start")
    parser.add_argument("extra", nargs="*", help="further key=value options of the training")
    arguments = parser.parse_args()
    try:
        device = choose_device(arguments.device, torch.cuda.is_available(), vllm_device())
        check_staleness(arguments.staleness, device)
    except ResourceError as error:
        sys.exit(f"make demo: {error}")
    fresh_directory(arguments.out)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    demo = Demo(arguments.algorithm, arguments.seed, device, arguments.out.resolve(),
                arguments.started_at, arguments.extra, arguments.staleness,
                arguments.world)  # fmt: skip
    try:
        demo.run()
    except RetrieverUnavailable as error:
        sys.exit(f"make demo: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"make demo stopped: `{' '.join(map(str, error.cmd[:4]))} …` failed, see above")
    summary = json.loads((demo.out / "summary.json").read_text())
    sys.exit(0 if summary["steps"] else 1)


if __name__ == "__main__":
    main()
