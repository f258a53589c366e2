"""Starting an agent from options: model, adapter and retriever, and their errors."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from search_r1.inference import default_model
from search_r1.inference.agent_options import InferenceOptions, read_template_kwargs
from search_r1.inference.building import checked_agent, run_config
from search_r1.inference.default_model import with_default_model
from search_r1.inference.dialogue import Reply
from search_r1.inference.model import model_folder
from search_r1.inference.opening import open_session
from tests.bad_models import bytes_of, entry, gone, text, whole_model
from verl.errors import ConfigError, ModelError
from verl.ext.lora.base import write_base

PROMPT = torch.tensor([[1, 50, 60, 70]])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model."""
    return whole_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the base model with random weights and settings for the short template."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"],
                        init_lora_weights=False, base_model_name_or_path=str(base))  # fmt: skip
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    (folder / "search_r1.json").write_text('{"template": "short", "max_turns": 1, "topk": 2}')
    return folder


def logits(folder: Path) -> torch.Tensor:
    """Return the logits of a folder's model for the prompt."""
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model(PROMPT).logits


def test_an_adapter_adds_its_product_to_each_weight(base: Path, adapter: Path) -> None:
    """The merged model's logits equal peft's unmerged ones, and the folder is temporary."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    from_peft = get_peft_model(model, LoraConfig.from_pretrained(adapter))
    from_peft.load_adapter(str(adapter), "default")
    with torch.no_grad():
        expected = from_peft(PROMPT).logits
    with model_folder(str(base), "float32", str(adapter)) as folder:
        found = logits(folder)
    assert torch.allclose(found, expected, atol=1e-4)
    assert not torch.allclose(found, logits(base), atol=0.1)
    assert not folder.exists()


def test_nothing_that_ships_is_put_before_an_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endpoint without --model is refused; neither the shipped nor the demo model is used."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo" / "model").mkdir(parents=True)
    options = InferenceOptions(endpoint="http://127.0.0.1:1/v1", served_model="policy")
    with pytest.raises(ModelError, match="--model"):
        with_default_model(options)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with the shipped adapter, and a program that makes its base at its second call."""
    program = (
        "import pathlib, sys\nout = pathlib.Path(sys.argv[2])\nfirst = pathlib.Path('first')\n"
        "out.mkdir(parents=True)\nif not first.exists():\n    first.touch()\n    1 / 0\n"
        "(out / 'config.json').touch()\n"
    )
    adapter = tmp_path / default_model.SHIPPED_ADAPTER
    adapter.mkdir(parents=True)
    config = {"base_model_name_or_path": default_model.SHIPPED_BASE}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "example" / "__init__.py").touch()
    (tmp_path / "example" / "model.py").write_text(program)
    monkeypatch.setattr(default_model, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_default_is_the_shipped_adapter(checkout: Path) -> None:
    """Its base is made once and atomically; an adapter of the recipe has the same base."""
    with pytest.raises(ModelError, match="ZeroDivisionError"):
        with_default_model(InferenceOptions())
    assert list((checkout / "models").iterdir()) == []
    base, adapter = checkout / default_model.SHIPPED_BASE, checkout / default_model.SHIPPED_ADAPTER
    for options in (InferenceOptions(), InferenceOptions(adapter=str(adapter))):
        chosen = with_default_model(options)
        assert (chosen.model, chosen.adapter) == (str(base), str(adapter))
    assert list((checkout / "models").iterdir()) == [base]


def test_the_demo_comes_first(checkout: Path) -> None:
    """It gets no adapter."""
    default_model.DEMO_MODEL.mkdir(parents=True)
    chosen = with_default_model(InferenceOptions())
    assert (chosen.model, chosen.adapter) == (str(default_model.DEMO_MODEL), None)


def test_an_adapter_names_its_base_and_its_wording(base: Path, adapter: Path) -> None:
    """Base model and dialogue settings come from the adapter's folder."""
    options = InferenceOptions(adapter=str(adapter), retriever_url="empty", device="cpu",
                            dtype="float32", max_response_length=3)  # fmt: skip
    assert with_default_model(options).model == str(base)

    async def ask() -> Reply:
        async with open_session(options) as session:
            assert session.agent.format.name == "short"
            assert session.agent.limits.max_turns == 1
            return await session.ask("Who?", session.prompt("Who?"))

    assert asyncio.run(ask()).trajectory.stats["turns"] <= 2


def test_an_adapter_brings_the_file_of_its_template(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    """It stands beside its settings, and is merged with it."""
    folder = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    (folder / "search_r1.json").write_text('{"template": "template.yaml"}')
    (folder / "template.yaml").write_text("instruction: 'Q {question}'\ninvalid_action: again\n")
    with model_folder(str(base), "float32", str(folder)) as merged:
        config = run_config(InferenceOptions(model="m"), str(merged))
        assert "Q {question}" in Path(config.template).read_text()


def test_an_adapter_of_another_model_is_refused(adapter: Path, tmp_path: Path, base: Path) -> None:
    """The message names the adapter's base model."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model.config.hidden_size, model.config.head_dim = 64, 16
    other = type(model)(model.config)
    other.save_pretrained(tmp_path)
    with (
        pytest.raises(ModelError, match=f"was trained on: {base}"),
        model_folder(str(tmp_path), "float32", str(adapter)),
    ):
        pass


def test_an_adapter_of_other_weights_is_refused(adapter: Path, base: Path, tmp_path: Path) -> None:
    """They have the shapes that the adapter fits; a run notes what it trained on beside it."""
    folder = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    write_base(folder, str(base))
    with model_folder(str(base), "float32", str(folder)) as merged:
        assert (merged / "config.json").is_file()
    other = whole_model(tmp_path / "other", seed=1)
    with (
        pytest.raises(ModelError, match=f"--adapter {folder}: .*was trained on: {base}"),
        model_folder(str(other), "float32", str(folder)),
    ):
        pass


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    """Return a function that rewrites an adapter's tensors in a folder."""

    def rewrite(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return rewrite


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
BAD_ADAPTERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tensor lacks": (tensors(lambda x: x.pop(FIRST)), "missing keys"),
    "none at all": (tensors(lambda x: x.clear()), "missing keys"),
    "of more layers": (tensors(lambda x: x.update({FIRST.replace("0", "9"): torch.ones(4, 128)})),
                       "unexpected keys"),
    "of another rank": (tensors(lambda x: x.update({FIRST: torch.ones(2, 128)})), "size mismatch"),
    "NaN": (tensors(lambda x: x[FIRST].fill_(torch.nan)), "NaN or infinite"),
    "infinite": (tensors(lambda x: x[FIRST][0].fill_(torch.inf)), "NaN or infinite"),
    "no weights": (gone("*.safetensors"), ""),
    "weights cut": (bytes_of("*.safetensors", lambda x: x[:-9]), ""),
    "settings no JSON": (text("adapter_config.json", "{"), "adapter_config.json"),
    "settings a list": (text("adapter_config.json", "[1]"), "adapter_config.json"),
    "settings null": (text("adapter_config.json", "null"), "adapter_config.json"),
    "kind unknown": (entry("adapter_config.json", "peft_type", "WOBBLE"), "WOBBLE"),
    "rank 0": (entry("adapter_config.json", "r", 0), ""),
    "rank a word": (entry("adapter_config.json", "r", "four"), ""),
    "layers unknown": (entry("adapter_config.json", "target_modules", ["wobble"]), "wobble"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_ADAPTERS)
def test_a_bad_adapter_is_refused_in_one_line(
    case: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    """Missing tensors would be random and unexpected ones silently ignored, so both are refused."""
    change, words = BAD_ADAPTERS[case]
    change(Path(shutil.copytree(adapter, tmp_path / "bad")))
    with (
        pytest.raises(ModelError) as caught,
        model_folder(str(base), "float32", str(tmp_path / "bad")),
    ):
        pass
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith("--adapter")


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "null", '{"max_turns": "2"}', '{"topk": 1.5}', '{"template": 5}',
                '{"agent": "mine"}', '{"agent": 1}',
                '{"tools": "search"}', '{"max_turns": true}', '{"max_turns": -1}', '{"topk": 0}',
                '{"tools": [1]}', '{"max_turns": 1000000}', '{"max_turn": 3}', '{"temperature": 1}',
                '{"tools": ["a.py:T"], "top_k": 3}', '{"apply_chat_template_kwargs": {}}',
                '{"topk": NaN}', '{"chat_template_kwargs": {"x": 1e999}}', '[["topk", 1]]',
                '{"topk": 99999999999999999999}', '{"template": "\\ud800"}', "[" * 100_000,
                '{"template": "' + "a" * 2_000_000 + '"}']
)  # fmt: skip
def test_bad_settings_of_a_model_are_refused_in_one_line(content: str, tmp_path: Path) -> None:
    """Invalid values in a model's `search_r1.json` are refused."""
    (tmp_path / "search_r1.json").write_text(content)
    with pytest.raises(ModelError, match=r"search_r1\.json") as caught:
        run_config(InferenceOptions(model="m"), str(tmp_path))
    assert "\n" not in str(caught.value)


def test_settings_that_a_tool_of_ones_own_stored_are_kept(tmp_path: Path) -> None:
    """`Tool.settings` may have any name that is not almost one of ours."""
    for tool in ("a.py:T", "python:T"):
        text = f'{{"tools": ["{tool}"], "units": "km", "topk": 4}}'
        (tmp_path / "search_r1.json").write_text(text)
        options = InferenceOptions(model="m", trust_remote_code=True)
        assert run_config(options, str(tmp_path)).retriever.topk == 4


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (['{"enable_thinking": false, "a": [1]}'], {"enable_thinking": False, "a": [1]}),
        (["{enable_thinking: no}"], {"enable_thinking": False}),
        (["enable_thinking=False", "b=low", "c=2", 'd={"e": null}'],
         {"enable_thinking": False, "b": "low", "c": 2, "d": {"e": None}}),
        (["a=b=c"], {"a": "b=c"}),
        (["{}"], {}),
    ],
)  # fmt: skip
def test_arguments_of_the_chat_template_are_an_object_or_words(
    words: list[str], expected: dict[str, object]
) -> None:
    """A word such as False is a value, as in the options of a run, and not a text that is true."""
    assert read_template_kwargs(words) == expected


@pytest.mark.parametrize(
    "words", [[], [""], ["false"], ["[1]"], ['{"a": 1'], ['{"a": 1, "a": 2}'], ["a=1", "a=2"],
              ["=1"], ["a b=1"], ["{1: 2}"], ["day=2024-01-01"], ["a=["], ["null"],
              ["{a: 1}", "b=2"]]
)  # fmt: skip
def test_what_is_no_object_is_refused_in_one_line(words: list[str]) -> None:
    """Before a retriever or model is looked for."""
    with pytest.raises(ConfigError, match="--chat-template-kwargs") as caught:
        read_template_kwargs(words)
    assert "\n" not in str(caught.value)


def test_the_agent_is_the_one_that_was_trained(tmp_path: Path) -> None:
    """Models without one have the loop; `--agent` comes first."""
    for saved, given, expected in (
        ("{}", None, "dialogue"),
        ('{"agent": "documents_first"}', None, "documents_first"),
        ('{"agent": "documents_first"}', "dialogue", "dialogue"),
    ):
        (tmp_path / "search_r1.json").write_text(saved)
        options = InferenceOptions(model="m", agent=given)
        assert run_config(options, str(tmp_path)).agent.name == expected


OWN = """
from dataclasses import replace
from search_r1.agent.generation import build_dialogue
from verl.agent.dialogue import DialogueAgent

def limited(config):
    agent = build_dialogue(config)
    return replace(agent, limits=replace(agent.limits, max_turns=7))

class Own(DialogueAgent):
    def __init__(self, config):
        agent = build_dialogue(config)
        super().__init__(agent.limits, agent.format, agent.environment, agent.tokenizer)

class Other:
    def __init__(self, config): ...
    async def run(self, start, engine, sampling): return start
"""


@pytest.mark.parametrize("saved", ["/own.py:Own", "openenv:http://127.0.0.1:1"])
def test_an_agent_of_others_is_not_trusted_unasked(saved: str, tmp_path: Path) -> None:
    """It may run code, or send questions to a server; naming it, or another, is consent."""
    (tmp_path / "search_r1.json").write_text(json.dumps({"agent": saved}))
    with pytest.raises(ModelError, match=rf"agent {saved}.*; fix: --agent {saved}"):
        run_config(InferenceOptions(model="m"), str(tmp_path))
    for options, expected in (
        (InferenceOptions(model="m", trust_remote_code=True), saved),
        (InferenceOptions(model="m", agent=saved), saved),
        (InferenceOptions(model="m", agent="dialogue"), "dialogue"),
    ):
        assert run_config(options, str(tmp_path)).agent.name == expected


@pytest.mark.parametrize("name", ["limited", "Own", "Other", "Missing"])
def test_an_agent_of_ones_own_answers_or_is_refused(name: str, base: Path, tmp_path: Path) -> None:
    """What is no `DialogueAgent` could not be followed: its searches would be missing."""
    (tmp_path / "own.py").write_text(OWN)
    options = InferenceOptions(model=str(base), agent=f"{tmp_path / 'own.py'}:{name}",
                               retriever_url="empty", device="cpu", dtype="float32",
                               max_response_length=2)  # fmt: skip

    async def ask() -> Reply:
        async with open_session(options) as session:
            return await session.ask("Who?", session.prompt("Who?"))

    if name in ("Other", "Missing"):
        with pytest.raises(ConfigError, match=r"fix: .*(--agent dialogue|correct the name)"):
            asyncio.run(ask())
    else:
        assert asyncio.run(ask()).trajectory.stats["turns"] == (8 if name == "limited" else 3)


def test_an_agent_passed_from_python_must_be_passed_again(base: Path, tmp_path: Path) -> None:
    """There is no file from which it could be made."""
    (tmp_path / "search_r1.json").write_text('{"agent": "python:Own"}')
    config = run_config(InferenceOptions(model=str(base)), str(tmp_path))
    config.actor_rollout_ref.model.path = str(base)
    config.actor_rollout_ref.rollout.name, config.trainer.device = "transformers", "cpu"
    with pytest.raises(ConfigError, match="pass it in from Python again"):
        checked_agent(config)


@pytest.mark.parametrize("agent", ["dialog", "openenv", "own.py", ""])
def test_a_name_that_is_no_agents_is_refused(agent: str) -> None:
    """Before anything is loaded."""
    with pytest.raises(ConfigError, match=r"^--agent: got .*expected one of dialogue.*fix: "):
        InferenceOptions(model="m", agent=agent)


def test_given_arguments_replace_those_of_the_model(tmp_path: Path) -> None:
    """The saved ones are the default; an empty object removes them."""
    (tmp_path / "search_r1.json").write_text('{"chat_template_kwargs": {"enable_thinking": false}}')
    for given, expected in (
        (None, {"enable_thinking": False}),
        ({"enable_thinking": True}, {"enable_thinking": True}),
        ({}, {}),
    ):
        options = InferenceOptions(model="m", chat_template_kwargs=given)
        config = run_config(options, str(tmp_path))
        assert config.data.chat_template_kwargs == expected
