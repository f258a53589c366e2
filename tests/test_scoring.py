"""Building a run's reward from its options and scoring trajectories."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from search_r1.agent.generation import build_environment, build_format
from search_r1.agent.grammar import SEARCH_R1
from search_r1.evaluation.options import EvaluationOptions
from search_r1.rewards.normalize import RULES
from search_r1.scoring import build_reward_manager, reward_input
from tests.core.agent.chat_templates import LLAMA, QWEN, ChatTokenizer
from tests.core.agent.test_native import play, tagged
from tests.fakes import ByteTokenizer
from tests.rewards.judge.server import judge_server
from verl import plugins
from verl.config import Config
from verl.config.known import known_options
from verl.config.reward import RewardConfig, StageConfig
from verl.data.prompts import render
from verl.data.rows import load_rows
from verl.errors import ConfigError
from verl.rewards.interface import EachAlone, Reward
from verl.types import Origin, Prompt, Segment, Trajectory, start_trajectory


def trajectory(*turns: tuple[Origin, str], text: str = "Who? ", **extra: str) -> Trajectory:
    """Build a finished trajectory with one token per segment."""
    done = start_trajectory(Prompt("f#0", (1,), "nq", ("Paris",), extra, text))
    done.segments += [
        Segment(origin, (2,), text, (0.0,) if origin is Origin.POLICY else ())
        for origin, text in turns
    ]
    return done


def config_with(**options: object) -> Config:
    config = Config()
    config.reward_model = RewardConfig(**options)  # type: ignore[arg-type]
    return config


def test_think_opened_by_the_chat_template_is_seen() -> None:
    """The prompt's own text reaches the format check, so its <think> counts."""
    reward = build_reward_manager(config_with(name="em_format"))
    policy = (Origin.POLICY, "b</think><answer>Paris</answer>")
    opened = trajectory(policy, text="<|im_start|>assistant\n<think>\n")
    seen = [r.components["format_valid"] for r in reward([opened, trajectory(policy)])]
    assert seen == [1.0, 0.0]


def test_the_template_decides_which_tags_count() -> None:
    """A dialogue of R1-Searcher is valid under its template only."""
    dialogue = trajectory(
        (Origin.POLICY, "<think>a <|begin_of_query|>q<|end_of_query|>"),
        (Origin.OBSERVATION, "<|begin_of_documents|>Doc<|end_of_documents|>"),
        (Origin.POLICY, "b</think><answer>Paris</answer>"),
    )
    config = config_with(name="r1_searcher_stage_2")
    assert build_reward_manager(config)([dialogue])[0].score == 1.0 - 2.0
    config.template = "r1_searcher"
    assert build_reward_manager(config)([dialogue])[0].score == 1.0


@pytest.mark.parametrize("name", ["em_format", "r1_searcher_stage_1", "r1_searcher_stage_2"])
@pytest.mark.parametrize("countries", [["Peru"], ["Peru", "Chad"]])
def test_a_native_dialogue_that_uses_tools_is_valid(name: str, countries: list[str]) -> None:
    """Engines keep the end of sequence in the text of each turn; a turn may have several calls."""
    tokenizer = ChatTokenizer()
    calls = "<think>I look it up.</think>\n" + "\n".join(map(tagged, countries))
    last = "<think>I know it.</think>\n<answer> Lima </answer>"
    done, _ = play(tokenizer, (calls, "stop"), (last, "stop"))
    assert done.segments[1].text.endswith(tokenizer.eos_token)
    config = config_with(name=name)
    config.template = "native"
    [reward] = build_reward_manager(config)([done])
    assert reward.components["format_valid"] == 1.0
    if name == "em_format":
        assert reward.score == reward.components["retrieval_hit"] == 1.0
    done.segments[1] = dataclasses.replace(done.segments[1], text=f"words {calls}")
    [reward] = build_reward_manager(config)([done])
    assert reward.components["format_valid"] == 0.0


@pytest.mark.parametrize("name", ["em_format", "r1_searcher_stage_1", "r1_searcher_stage_2", "em"])
def test_the_form_is_not_rewarded_where_results_have_no_tags(name: str) -> None:
    """Of Llama's templates, no dialogue with a search would be valid: refused before a run."""
    config = config_with(name=name)
    config.template = "native"
    tools = build_environment(config)
    refused = pytest.raises(ConfigError, match=rf"reward_model.name: got {name}, .*; fix: ")
    with refused if name != "em" else contextlib.nullcontext():
        build_format(config, tools, ChatTokenizer(LLAMA, "<|eot_id|>"))
    assert build_format(config, tools, ChatTokenizer(QWEN)).name == "native"


@pytest.mark.parametrize("stages", [[], [StageConfig("em")]])
@pytest.mark.parametrize(("rule", "score"), [("squad", 0.0), ("unicode", 1.0)])
def test_the_rule_of_normalisation_is_an_option(
    rule: str, score: float, stages: list[StageConfig]
) -> None:
    """`reward_model.normalize` reaches the reward of a run, also of its stages."""
    reward = build_reward_manager(config_with(name="em", normalize=rule, stages=stages))
    dialogue = trajectory((Origin.POLICY, "<answer>Par\u200bis\u2019</answer>"))
    assert reward([dialogue])[0].score == score
    choices, _ = get_args(EvaluationOptions.__annotations__["normalize"])
    assert get_args(choices) == tuple(RULES)
    assert known_options()["reward_model.normalize"].limits.allowed_words == tuple(RULES)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"judge": {"ulr": "http://127.0.0.1:9/v1"}}, "judge.ulr"),
        ({"judge": {"verdict": "maybe"}}, "judge.verdict"),
        ({"judge": {"timeout": float("inf")}}, "judge.timeout"),
        ({"name": "python:own", "scores": {"search_penalty": 0.1}}, "scores.search_penalty"),
    ],
)
def test_settings_are_checked_where_no_reward_uses_them(options: dict[str, Any], key: str) -> None:
    """A misspelt setting is not swallowed, nor a score that a reward of the user's does not use."""
    own = EachAlone(lambda trajectory: Reward(0.0))
    with (
        plugins.registered({"python:own": own}),
        pytest.raises(ConfigError, match=key),
    ):
        build_reward_manager(config_with(**options))


def test_stages_are_built_from_options() -> None:
    """The second stage is used once the first has ended."""
    options = [StageConfig("r1_searcher_stage_1", until_step=1), StageConfig(weights={"f1": 3.0})]
    reward = build_reward_manager(config_with(stages=options))
    dialogue = trajectory((Origin.POLICY, "<think>a</think><answer>Paris</answer>"))
    assert reward([dialogue])[0].score == 0.5
    assert reward.observe(1, {}) == {"reward/stage": 1.0}
    (second,) = reward([dialogue])
    assert (second.score, second.components["f1_score"]) == (3.0, 1.0)


def test_the_judge_is_asked_with_question_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge gets the row's question, or else the whole prompt, and the key of the variable."""
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with judge_server(lambda n, body: "yes") as server:
        judge = {"url": server.url, "model": "m", "api_key_env": "JUDGE_KEY",
                 "cache_path": str(tmp_path / "c")}  # fmt: skip
        reward = build_reward_manager(config_with(name="llm_judge", judge=judge))
        answer = (Origin.POLICY, "<answer>the city of light</answer>")
        rewards = reward([trajectory(answer, question="Where?"), trajectory(answer)])
    assert [r.score for r in rewards] == [1.0, 1.0]
    messages = [body["messages"][0]["content"] for body in server.requests[1:]]
    assert sorted("Where?" in message for message in messages) == [False, True]
    assert sum('question: "Who? "' in message for message in messages) == 1
    assert {h["authorization"] for h in server.headers} == {"Bearer secret"}


def test_mistakes_end_in_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown rewards, negative costs, a judge that does not answer and bad keys are refused."""
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(ConfigError, match="did you mean 'em_format'"):
        build_reward_manager(config_with(name="em_fromat"))
    for cost, size in (("search_penalty", 0.1), ("invalid_format", 5.0)):
        with pytest.raises(ConfigError, match=f"{cost}: got -{size}, .*; fix: {cost}={size}"):
            build_reward_manager(config_with(name="em_cost", scores={cost: -size}))
    dead: dict[str, object] = {"url": "http://127.0.0.1:9/v1", "model": "m", "cache_path": None}
    with pytest.raises(ConfigError, match="http://127"):
        build_reward_manager(config_with(name="llm_judge", judge=dead))
    dead["api_key_env"] = "NO_KEY"
    with pytest.raises(ConfigError, match="export NO_KEY"):
        build_reward_manager(config_with(name="llm_judge", judge=dead))
    monkeypatch.setenv("NO_KEY", "two words")
    with pytest.raises(ConfigError) as refused:
        build_reward_manager(config_with(name="llm_judge", judge=dead))
    assert "two words" not in str(refused.value)
    secret = {"url": "http://user:secret@127.0.0.1:9/v1", "model": "m"}
    with pytest.raises(ConfigError) as refused:
        build_reward_manager(config_with(name="llm_judge", judge=secret))
    assert "secret" not in str(refused.value)


def test_prompt_text_and_question_travel_from_the_file(tmp_path: Path) -> None:
    """A row's question (in the original's column too) and the rendered prompt reach the reward."""
    record = {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": "Answer: who?"}],
        "question": "who?",
        "reward_model": {"ground_truth": {"target": ["x"]}},
        "extra_info": {"index": 0},
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(record) + "\n")
    (row,) = load_rows(str(path))
    prompt = render(row, ByteTokenizer())
    seen = reward_input(start_trajectory(prompt), SEARCH_R1)
    assert (seen.question, seen.segments[0]) == ("who?", ("prompt", "Answer: who?"))
    assert bytes(prompt.ids[:12]).decode() == prompt.text


@pytest.mark.parametrize(
    ("truth", "given"),
    [("Paris", "Paris"), (["Paris"], ["Paris"]), ({"target": ["Paris"]}, {"target": ["Paris"]}),
     ({"target": "Paris"}, {"target": "Paris"}), (["Paris", "Paris"], ["Paris", "Paris"]),
     ({"target": ["Paris"], "must_cite": ["doc7"]}, {"target": ["Paris"], "must_cite": ["doc7"]}),
     ("['Paris']", ["Paris"]), ({"target": "['Paris']"}, {"target": ["Paris"]}),
     ('{"target": "Paris", "answer": "so"}', {"target": "Paris", "answer": "so"})],
)  # fmt: skip
def test_a_function_for_verl_gets_the_ground_truth_of_the_row(
    truth: object, given: object, tmp_path: Path
) -> None:
    """The row's own object reaches a user's function, with the row's extra_info.

    What was saved as text is read, and keys beside the target are no answers.
    """
    record = {"data_source": "nq", "prompt": "Who?", "extra_info": {"index": 5},
              "reward_model": {"ground_truth": truth}}  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps(record) + "\n")
    (row,) = load_rows(str(tmp_path / "rows.jsonl"))
    seen = reward_input(start_trajectory(render(row, ByteTokenizer())), SEARCH_R1)
    assert (seen.row_truth, seen.extra_info["index"]) == (given, 5)
    assert seen.ground_truth == ("Paris",)
