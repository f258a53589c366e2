"""The agent `documents_first`: the documents for the question itself come before the first turn.

They are an observation between the prompt and the first sampled token, so they are the same for all
samples of a group, which a forward pass and an update then compute once (`verl.packing`).
"""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Self

from search_r1.agent.question import question_line
from search_r1.agent.search import SearchTool
from verl.agent import native
from verl.agent.dialogue import DialogueAgent
from verl.agent.interface import ToolCall, Turn
from verl.agent.native import NativeFormat
from verl.config import Config
from verl.engine import RolloutEngine
from verl.errors import ConfigError, DataError, explain
from verl.types import Origin, Prompt, Sampling, Segment, Status, Trajectory

NAME = "documents_first"


@dataclass(frozen=True)
class DocumentsFirst(DialogueAgent):
    """The built-in loop, in which the environment calls `search` with the question first."""

    @classmethod
    def over(cls, agent: DialogueAgent, config: Config) -> Self:
        """Return the run's agent with documents first. Raises ConfigError if it cannot have any."""
        has_tool, subject = agent.environment.find(SearchTool.name) is not None, "agent.name"
        if not (has_tool and config.do_search):
            got = f"{NAME} with " + ("do_search=false" if has_tool else "no tool search")
            fix = "agent.name=dialogue, or agent.tools=[search] and do_search=true"
            raise ConfigError(explain(subject, got, "a tool that gives documents", fix))
        data = config.data
        longest = data.max_start_length + data.max_obs_length
        if longest > data.max_prompt_length:
            got = f"{NAME} with max_prompt_length={data.max_prompt_length}"
            expected = f"at least {longest}, max_start_length and max_obs_length together"
            fix = f"data.max_prompt_length={longest} (--max-prompt-length {longest}) or more"
            raise ConfigError(explain(subject, got, expected, fix))
        return cls(agent.limits, agent.format, agent.environment, agent.tokenizer, agent.reserved)

    async def _play(
        self, trajectory: Trajectory, engine: RolloutEngine, sampling: Sampling,
        counts: Counter[str],
    ) -> Status:  # fmt: skip
        if self.environment.enabled:  # it is not for a baseline of an evaluation
            documents = await self._documents(trajectory)
            # A closed thinking part stays right before the first turn.
            end = len(trajectory.segments) - bool(self._opening)
            trajectory.segments.insert(end, documents)
            counts["observation_tokens"] += len(documents.ids)
        return await super()._play(trajectory, engine, sampling, counts)

    async def _documents(self, trajectory: Trajectory) -> Segment:
        """Search for the question; return the observation. Raises ToolError."""
        call = ToolCall(SearchTool.name, known_question(trajectory.prompt))
        observation = await self.environment.call(call)
        for name, count in observation.faults.items():
            trajectory.faults[name] = trajectory.faults.get(name, 0) + count
        # Templates want an answer to a written call, which is still open.
        turn = Turn((call,), is_open=isinstance(self.format, NativeFormat))
        fitting = self.fit(turn, [observation.items])
        text = self.written(call) + self.format.respond(turn, fitting, self.reserved or ())
        return self._encoded_segment(Origin.OBSERVATION, text)

    def written(self, call: ToolCall) -> str:
        """Return the text of the call before its documents: none, unless the template wants it."""
        return write_call(self.format, call) if isinstance(self.format, NativeFormat) else ""


def write_call(format: NativeFormat, call: ToolCall) -> str:
    """Return the call as a policy of the format would write it."""
    tool = next(tool for tool in format.tools if tool.name == call.tool)
    arguments = {tool.main_argument: call.arguments}
    if native.CALL.opening in str(format.tokenizer.chat_template):
        content = {"name": call.tool, "arguments": arguments}
        return native.CALL.wrap(f"\n{json.dumps(content, ensure_ascii=False)}\n")
    return json.dumps({"name": call.tool, "parameters": arguments}, ensure_ascii=False)


def known_question(prompt: Prompt, agent: str = NAME) -> str:
    """Return `extra_info.question`, or the rest of the line after `Question:` in the prompt.

    Raises DataError if there is neither; `agent` needs it.
    """
    question = prompt.extra_info.get("question")
    if isinstance(question, str) and question.strip():
        return question.strip()
    if not (found := question_line(prompt.text)):
        fix = "add the column extra_info.question, or agent.name=dialogue"
        got = "a row without the question alone"
        raise DataError(explain(prompt.uid, got, f"extra_info.question, for {agent}", fix))
    return found
