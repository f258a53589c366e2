"""Runs training ranks on a simulated GPU: a JSON list of cases in, a JSON line per outcome out.

It runs rank 0 only; its collectives return at once, without other ranks. Only the source of the
weights is fake; worker, models and losses are the real ones.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Qwen2Config

from tests.nightly.pretend_cuda import machine
from tests.nightly.pretend_cuda.ledger import Ledger
from tests.nightly.pretend_cuda.mode import PretendCuda
from tests.nightly.pretend_cuda.receiving import describe, send_weights
from verl.batch import TokenBatch
from verl.config import Config
from verl.core_algos.losses import loss_weights
from verl.ext.sft import run as sft
from verl.ext.sft.options import SftConfig
from verl.preflight.undecided import fill_undecided
from verl.training import roles
from verl.training.attention import PACKED
from verl.training.devices import join_process_group
from verl.training.loading import Placeholder, replace_parameters
from verl.training.worker import TrainerWorker

LONGEST, PROMPT = 1500, 300
BACKENDS = {"cpu:gloo,cuda:nccl": "cpu:fake,cuda:fake"}


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen2."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    is_tied: bool

    def facts(self) -> Qwen2Config:
        return Qwen2Config(
            vocab_size=self.vocab, hidden_size=self.hidden, intermediate_size=self.intermediate,
            num_hidden_layers=self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads, tie_word_embeddings=self.is_tied,
        )  # fmt: skip


SHAPES = {
    "tiny": Shape(64, 2, 4, 2, 128, 256, True),
    "0.5B": Shape(896, 24, 14, 2, 4864, 151936, True),
    "1.5B": Shape(1536, 28, 12, 2, 8960, 151936, True),
    "3B": Shape(2048, 36, 16, 2, 11008, 151936, True),
    "7B": Shape(3584, 28, 28, 4, 18944, 152064, False),
    "8B": Shape(4096, 32, 32, 8, 14336, 128256, False),
    "32B": Shape(5120, 64, 40, 8, 27648, 152064, False),
}


@dataclass(frozen=True)
class Case:
    """One trial."""

    algorithm: str
    """grpo, ppo, lora (GRPO with an adapter), critic (a rank of PPO's critic alone) or sft."""
    offload: str = "none"
    """none, param, optimizer or reference."""
    world: int = 1
    dtype: str = "bfloat16"
    shape: str = "tiny"
    budget: int = 4096
    """Tokens of one packed forward."""
    micro_batches: int = 2
    """Micro-batches of an update."""
    layers: int = 0
    """Number of layers in place of the shape's; 0 keeps the shape's."""
    only_nccl: bool = False
    """Let the process group refuse tensors on the host."""
    reshard_each: bool = True
    """Reshard weights and reduce gradients in each micro-batch."""
    recompute: bool | str = True
    """`enable_gradient_checkpointing` of policy and critic."""
    sp_size: int = 1
    """Ranks that compute a forward together."""
    by_ipc: bool = False
    """Send the weights to an engine on the same GPU at the end."""
    longest: int = LONGEST
    """Upper limit of a sequence's tokens."""

    def config(self) -> Config:
        config = Config()
        section = config.actor_rollout_ref
        section.model.path = "pretended"
        is_ppo = self.algorithm in ("ppo", "critic")
        config.algorithm.adv_estimator = "gae" if is_ppo else "grpo"
        config.critic.n_gpus_per_node = self.world if self.algorithm == "critic" else None
        config.trainer.n_gpus_per_node, config.trainer.device = self.world, "cuda"
        config.trainer.compute_dtype = self.dtype
        section.actor.use_kl_loss = True
        section.actor.ulysses_sequence_parallel_size = self.sp_size
        section.actor.ppo_max_token_len_per_gpu = self.budget // self.sp_size
        config.critic.ppo_max_token_len_per_gpu = self.budget // self.sp_size
        for trained in (section.actor, config.critic.model):
            trained.fsdp_config.param_offload = self.offload == "param"
            trained.fsdp_config.optimizer_offload = self.offload == "optimizer"
            trained.fsdp_config.reshard_each = self.reshard_each
        for model in (section.model, config.critic.model):
            model.enable_gradient_checkpointing = self.recompute
        section.ref.fsdp_config.param_offload = self.offload in ("param", "reference")
        if self.algorithm == "lora":
            section.model.lora_rank = 8
        config.data.max_prompt_length = max(
            config.data.max_prompt_length, self.longest - config.data.max_response_length
        )
        return fill_undecided(config)


@dataclass
class Phase:
    """Cost of one call of the worker."""

    seconds: float
    peak: int
    """Peak bytes on the device."""
    left: int
    """Additional bytes on the device after the call."""
    flops: dict[str, int]
    costs: dict[str, Any]
    calls: dict[str, int]
    """Calls of `torch.cuda` functions."""


@dataclass
class Outcome:
    """Outcome of a trial."""

    case: Case
    error: str = ""
    phases: dict[str, Phase] = field(default_factory=dict)
    held: int = 0
    """Bytes on the device between two steps."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Trial:
    """A case running on a simulated GPU."""

    case: Case
    ledger: Ledger
    mode: PretendCuda
    outcome: Outcome

    def phase(self, name: str, call: Callable[[], Any]) -> Any:
        """Run a call and record its costs."""
        ledger, before, start = self.ledger, self.ledger.live, time.perf_counter()
        ledger.peak = before
        ledger.flops.clear()
        self.mode.costs.take()
        machine.CALLS.clear()
        with self.mode:
            result = call()
        self.outcome.phases[name] = Phase(
            time.perf_counter() - start, ledger.peak, ledger.live - before, dict(ledger.flops),
            self.mode.costs.take(), dict(machine.CALLS),
        )  # fmt: skip
        return result

    def run(self) -> None:
        match self.case.algorithm:
            case "sft":
                self.run_sft()
            case "critic":
                self.run_critic()
            case _:
                self.run_actor()

    def run_actor(self) -> None:
        """Run the calls of a training step on a rank of the actor."""
        config, world = self.case.config(), self.case.world
        with self.mode:
            worker = TrainerWorker(config, 0, world, "127.0.0.1", 1, 100)
        self.track(worker.models.values())
        batch = make_batch(self.case)
        self.phase("log_probs", lambda: worker.actor.log_probs(batch))
        self.phase("ref_log_probs", lambda: worker.reference.log_probs(batch))
        if worker.critic is not None:
            self.phase("values", lambda: worker.critic.values(batch))
            self.phase("update_critic", lambda: worker.critic.update(batch))
        found = self.phase("update_actor", lambda: worker.actor.update(batch))
        self.outcome.metrics = {name: float(value) for name, value in found.items()}
        if self.case.shape == "tiny":
            self.phase("tensors", lambda: [m.state_tensors() for m in worker.models.values()])
            with tempfile.TemporaryDirectory() as folder:
                self.phase("save_weights", lambda: worker.save_policy(folder, self.case.dtype))
        if self.case.by_ipc:
            with self.mode:
                expected = describe(worker.actor.model.policy_weights(self.case.dtype))
            received = self.phase("send_weights", lambda: send_weights(worker, self.case.dtype))
            dtype = f"torch.{self.case.dtype}"  # that of the engine
            assert received == [(name, dtype, shape) for name, _, shape in expected]
        self.outcome.held = self.ledger.live
        worker.shutdown()

    def run_critic(self) -> None:
        """Run the calls of a training step on a rank of a critic with its own devices."""
        with self.mode:
            world = 0, self.case.world, "127.0.0.1", 1
            worker = TrainerWorker(self.case.config(), *world, 100, group="critic rank")
        self.track(worker.models.values())
        batch = make_batch(self.case)
        self.phase("values", lambda: worker.critic.values(batch))
        found = self.phase("update_critic", lambda: worker.critic.update(batch))
        self.outcome.metrics = {name: float(value) for name, value in found.items()}
        self.outcome.held = self.ledger.live
        worker.shutdown()

    def run_sft(self) -> None:
        """Run a step of supervised fine-tuning."""
        device = torch.device("cuda", 0)
        config = SftConfig(
            model_path="pretended", train_file="none", output_dir="none", steps=4,
            device="cuda", compute_dtype=self.case.dtype,
        )  # fmt: skip
        with self.mode:
            join_process_group(device, 0, self.case.world)
            lm = sft.load_causal_lm("pretended")
            model = sft.build_model(config, lm, device)
        self.track([model])
        batch = make_batch(self.case)
        self.phase("update_actor", lambda: sft.train_step(model, batch, self.case.budget))
        self.outcome.held = self.ledger.live
        dist.destroy_process_group()

    def track(self, built: Any) -> None:
        """Count tensors that were created before the ledger tracked operations."""
        gc.collect()
        for model in built:
            self.ledger.track([*model.module.parameters(), *model.module.buffers()])
            states = model.optimizer.adamw.state.values() if model.optimizer is not None else ()
            self.ledger.track(value for state in states for value in state.values())


def make_batch(case: Case) -> TokenBatch:
    """Make sequences with an observation each, as long as the case's budget allows."""
    longest = min(case.longest, case.budget)
    lengths = [longest] * (case.micro_batches * (case.budget // longest))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    total = int(offsets[-1])
    mask = torch.zeros(total, dtype=torch.bool)
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        mask[start + PROMPT : start + PROMPT + 200] = True
        mask[end - 200 : end] = True
    names = ("advantages", "returns", "values", "old_log_probs", "ref_log_probs",
             "rollout_log_probs")  # fmt: skip
    tokens = {name: torch.zeros(total) for name in names}
    tokens |= {
        "input_ids": torch.zeros(total, dtype=torch.int64),
        "policy_mask": mask, "loss_mask": mask,
        "loss_weights": loss_weights(mask, offsets, "token-mean"),
    }  # fmt: skip
    return TokenBatch(offsets, tokens, columns={"group": ["0/0"] * len(lengths)})


@contextlib.contextmanager
def simulated_gpu(case: Case, mode: PretendCuda) -> Iterator[None]:
    """Fake the loading of weights, and replace NCCL and gloo by torch's fake process group."""
    shape = SHAPES[case.shape]
    facts = shape.facts()
    facts.num_hidden_layers = case.layers or shape.layers
    join = dist.init_process_group

    def fake_join(backend: str, rank: int, world_size: int, **_: Any) -> None:
        backends = "cuda:fake" if case.only_nccl else BACKENDS[backend]
        join(backends, rank=rank, world_size=world_size, store=FakeStore())

    def fake_load(path: str, dtype: torch.dtype = torch.float32) -> Any:
        with mode.fake:
            lm = AutoModelForCausalLM.from_config(
                facts, dtype=dtype, attn_implementation=PACKED
            ).to("cuda:0")
        lm.tie_weights()
        # Sources of the weights are on the host; these take no memory there.
        replace_parameters(lm, lambda p: Placeholder(
            torch.zeros((), dtype=p.dtype).expand(p.shape), p.dtype, p.requires_grad
        ))  # fmt: skip
        return lm

    @contextlib.contextmanager
    def fake_open(path: str, dtype: torch.dtype, *_: Any, **__: Any) -> Iterator[Any]:
        yield fake_load(path, dtype)

    replaced: list[tuple[Any, str, Any]] = [
        (dist, "init_process_group", fake_join),
        (roles, "open_causal_lm", fake_open),
        (sft, "load_causal_lm", fake_load),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    for module, name, value in replaced:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        if dist.is_initialized():
            dist.destroy_process_group()


def run(case: Case, ledger: Ledger) -> Outcome:
    """Run a trial; an error becomes part of the outcome."""
    outcome, mode = Outcome(case), PretendCuda(ledger)
    machine.install(case.world, case.dtype)
    gc.collect()
    with simulated_gpu(case, mode):
        try:
            Trial(case, ledger, mode, outcome).run()
        except Exception as error:  # noqa: BLE001 - reported; the next trial runs
            frames = traceback.extract_tb(error.__traceback__)
            lines = [
                f"{Path(f.filename).name}:{f.lineno}" for f in frames if "/verl/" in f.filename
            ]
            message = str(error).partition("\n")[0]
            outcome.error = f"{type(error).__name__}: {message} at {' > '.join(lines)}"
    return outcome


def main() -> None:
    ledger = Ledger()
    gc.freeze()  # collections after trials need not traverse all of torch
    for facts in json.loads(sys.argv[2]):
        sys.stdout.write(json.dumps(asdict(run(Case(**facts), ledger))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
