"""Supervised fine-tuning compared with a hand-written loop, and its errors for bad input."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from example.tiny import tiny_llama
from tests.bad_models import BAD, whole_model
from verl.batch import TokenBatch
from verl.errors import ConfigError, DataError, ModelError
from verl.ext.lora.base import BASE_FILE
from verl.ext.sft import run as sft
from verl.ext.sft import trainer
from verl.ext.sft.demonstrations import load_demonstrations
from verl.ext.sft.options import parse
from verl.model_files import weights_fingerprint

WORDS = ["<unk>", "<end>", "ask", "find", "say", "city", "sea", "one", "two", "user", "assistant"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a word-level tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    tiny_llama(len(WORDS)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of four dialogues of different lengths."""
    path = tmp_path_factory.mktemp("data") / "sft.jsonl"
    rows = [
        {
            "prompt": [{"role": "user", "content": f"ask {number}"}],
            "segments": [
                {"origin": "policy", "text": "find " + "city " * count},
                {"origin": "observation", "text": "sea sea"},
                {"origin": "policy", "text": f"say {number}"},
            ],
        }
        for count, number in enumerate(["one", "two", "one", "two"], start=1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def words(model: str, text: str) -> list[int]:
    return AutoTokenizer.from_pretrained(model).encode(text, add_special_tokens=False)


def test_segments_become_masked_tokens(model: str, demonstrations: str) -> None:
    """Only policy tokens are trained on; the end of turn is appended if configured."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = load_demonstrations(demonstrations, tokenizer, 100, end_of_turn=" <end>")
    batch = TokenBatch.from_trajectories(found[:1])
    expected = "user ask one assistant find city sea sea say one <end>"
    assert batch.tokens["input_ids"].tolist() == words(model, expected)
    assert batch.tokens["policy_mask"].int().tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1]


def test_unicode_line_separators_do_not_end_a_row(model: str, tmp_path: Path) -> None:
    """Documents contain line and paragraph separators, which JSON may leave unescaped."""
    document = "sea\u2028sea\u2029sea\u0085sea"
    parts = [{"origin": "observation", "text": document}, {"origin": "policy", "text": "say one"}]
    row = {"prompt": [{"role": "user", "content": "ask one"}], "segments": parts}
    path = tmp_path / "sft.jsonl"
    path.write_text(2 * (json.dumps(row, ensure_ascii=False) + "\n"), encoding="utf-8")
    found = load_demonstrations(str(path), AutoTokenizer.from_pretrained(model), 100)
    assert [t.segments[1].text for t in found] == [document, document]


def hand_written(
    model: str, demonstrations: str, steps: int
) -> tuple[list[float], torch.nn.Module]:
    """Train on two rows per step in file order with AdamW, one forward pass per row, no packing."""
    lm = tiny_llama(len(WORDS))
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    rows = [json.loads(line) for line in Path(demonstrations).read_text().splitlines()]
    losses = []
    for step in range(steps):
        nll = []
        for row in rows[step * 2 : step * 2 + 2]:
            ids = words(model, f"user {row['prompt'][0]['content']} assistant")
            for segment in row["segments"]:
                new = words(model, segment["text"])
                if segment["origin"] == "policy":
                    logits = lm(torch.tensor([ids + new])).logits[0, len(ids) - 1 : -1]
                    log_p = torch.log_softmax(logits, -1)
                    nll.append(-log_p[torch.arange(len(new)), torch.tensor(new)])
                ids += new
        loss = torch.cat(nll).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, lm


def options(model: str, demonstrations: str, out: Path) -> list[str]:
    return [
        f"model_path={model}", f"train_file={demonstrations}", f"output_dir={out}", "steps=2",
        "batch_size=2", "lr=1e-3", "schedule=constant", "warmup_steps=0", "shuffle=false",
        "device=cpu", "compute_dtype=float32", "save_dtype=float32",
        "max_tokens_per_micro_batch=12",
    ]  # fmt: skip


@pytest.fixture
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train as without torchrun; the variables that training then sets are removed afterwards."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "restored afterwards")
        monkeypatch.delenv(name)


def test_losses_and_weights_equal_a_hand_written_loop(
    model: str, demonstrations: str, tmp_path: Path, no_torchrun: None
) -> None:
    """Packing, micro-batches and sharding change nothing; the result loads with its tokenizer."""
    out = tmp_path / "out"
    found = sft.train(parse(options(model, demonstrations, out)))
    losses, lm = hand_written(model, demonstrations, 2)
    assert found == pytest.approx(losses, rel=1e-4)
    trained = AutoModelForCausalLM.from_pretrained(out)
    for name, x in trained.named_parameters():
        expected = lm.get_parameter(name)
        torch.testing.assert_close(x, expected, rtol=1e-3, atol=1e-4)
    assert AutoTokenizer.from_pretrained(out).encode("ask") == words(model, "ask")
    assert not out.with_name("out.tmp").exists()


@pytest.mark.slow
def test_two_ranks_under_torchrun_write_the_same_weights(
    model: str, demonstrations: str, tmp_path: Path
) -> None:
    """The number of processes does not change the result."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "verl.ext.sft.trainer", *options(model, demonstrations, out)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    _, lm = hand_written(model, demonstrations, 2)
    trained = AutoModelForCausalLM.from_pretrained(out)
    for name, x in trained.named_parameters():
        torch.testing.assert_close(x, lm.get_parameter(name), rtol=1e-3, atol=1e-4)


def test_an_adapter_is_trained_merged_and_saved(
    model: str, demonstrations: str, tmp_path: Path, no_torchrun: None
) -> None:
    """It starts as zero, and the saved weights are the base plus alpha / r · B A."""
    out = tmp_path / "out"
    extra = ["lora_rank=2", "lora_alpha=6", "target_modules=[q_proj,up_proj]", "lr=1e-2"]
    found = sft.train(parse([*options(model, demonstrations, out), *extra]))
    losses, _ = hand_written(model, demonstrations, 1)
    assert found[0] == pytest.approx(losses[0], rel=1e-4)
    assert json.loads((out / "adapter" / BASE_FILE).read_text()) == {
        "fingerprint": weights_fingerprint(model)
    }
    adapter = load_file(out / "adapter/adapter_model.safetensors")
    lm = tiny_llama(len(WORDS))
    for name, x in AutoModelForCausalLM.from_pretrained(out).named_parameters():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        expected = lm.get_parameter(name).detach()
        if "q_proj" in name or "up_proj" in name:
            delta = 3 * adapter[f"{key}.lora_B.weight"] @ adapter[f"{key}.lora_A.weight"]
            assert delta.abs().max() > 1e-4
            expected = expected + delta
        torch.testing.assert_close(x.detach(), expected, rtol=0, atol=1e-6)


def test_training_goes_on_from_an_adapter(
    model: str, demonstrations: str, tmp_path: Path, no_torchrun: None
) -> None:
    """Its first loss is that of the weights with the adapter merged; another rank is refused."""
    extra = ["lora_rank=2", "lora_alpha=6", "target_modules=[q_proj,up_proj]", "lr=1e-2"]
    sft.train(parse([*options(model, demonstrations, tmp_path / "first"), *extra]))
    start = f"adapter_path={tmp_path / 'first' / 'adapter'}"
    merged = options(str(tmp_path / "first"), demonstrations, tmp_path / "merged")
    expected = sft.train(parse([*merged, *extra]))
    more = [*options(model, demonstrations, tmp_path / "second"), *extra, start]
    assert sft.train(parse(more))[0] == pytest.approx(expected[0], rel=1e-4)
    with pytest.raises(ConfigError, match="rank 2, alpha 6"):
        sft.train(parse([*more, "lora_rank=3"]))
    with pytest.raises(ConfigError, match="adapter_path"):
        parse([*more, "lora_rank=0"])
    other = shutil.copytree(model, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    changed = {name: tensor + 1 for name, tensor in weights.items()}
    save_file(changed, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="adapter_path"):
        sft.train(parse([*options(str(other), demonstrations, tmp_path / "third"), *extra, start]))


def test_the_order_depends_on_the_seed() -> None:
    """Every epoch contains each row once; without shuffling, seed 0 gives file order."""
    data = TokenBatch(torch.arange(0, 9), {"policy_mask": torch.ones(8, dtype=torch.bool)})
    data.columns["row"] = list(range(8))

    def order(shuffle: bool, seed: int) -> list[int]:
        return [r for b in sft.batches(data, 2, 4, shuffle, seed) for r in b.columns["row"]]

    assert order(False, 0) == list(range(8))
    assert sorted(order(True, 0)) == sorted(order(True, 1)) == list(range(8))
    assert order(True, 0) != order(True, 1)
    assert order(True, 1) == order(True, 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "row 1.*Expecting property name"),
        ('{"prompt": []}', "row 1.*segments"),
        ('{"prompt": [], "segments": [{"origin": "model", "text": "x"}]}', "row 1.*model"),
        ('{"prompt": [], "segments": [{"origin": "observation", "text": "x"}]}', "row 1.*policy"),
    ],
)
def test_a_bad_row_is_refused_with_its_number(
    model: str, demonstrations: str, tmp_path: Path, line: str, message: str
) -> None:
    """The error names the row, its problem and the expected form."""
    good = Path(demonstrations).read_text().splitlines()[0]
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(DataError, match=message):
        load_demonstrations(str(path), AutoTokenizer.from_pretrained(model), 100)


def test_an_over_long_row_is_refused(model: str, demonstrations: str) -> None:
    """Rows are not truncated silently."""
    with pytest.raises(DataError, match=r"row 3.*max_length=12"):
        load_demonstrations(demonstrations, AutoTokenizer.from_pretrained(model), 12)


@pytest.mark.parametrize(
    "case", ["layers 4 over 2", "no tokenizer", "template that raises", "quantized"]
)
def test_a_bad_model_is_refused_before_the_ranks_join(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same one-line error as in RL training (`tests/bad_models.py`)."""
    BAD[case][0](whole_model(tmp_path / "model"))
    words = {"model_path": "model", "train_file": "none.jsonl", "output_dir": "out"}
    assert trainer.main([f"{key}={tmp_path / name}" for key, name in words.items()]) == 2
    line = capsys.readouterr().err.splitlines()[-1]  # after the progress bar of save_pretrained
    assert "model_path: got " in line and BAD[case][1] in line


def test_a_quantized_model_of_the_hub_is_refused_before_it_is_downloaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its config.json alone, in one line."""
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}
    monkeypatch.setattr(PretrainedConfig, "get_config_dict", lambda name: (config, {}))
    out = tmp_path / "out"
    arguments = ["model_path=org/tiny", "train_file=none.jsonl", f"output_dir={out}"]
    assert trainer.main(arguments) == 2
    assert "model_path: got org/tiny, whose weights are quantized (gptq)" in capsys.readouterr().err
