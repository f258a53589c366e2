"""Chat templates in the formats of Qwen2.5, Qwen3 and Llama 3.x, and a byte tokenizer."""

from __future__ import annotations

import json
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

QWEN = """\
{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Calls are in <tool_call> tags; all results of a turn are in one user message."""

LLAMA = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if tools and loop.first %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
"""Calls are bare JSON; each result is a separate message, as a JSON string."""

TOOLLESS = "{% for message in messages %}{{ message.role + ': ' + message.content }}{% endfor %}"


class ChatTokenizer:
    """A byte tokenizer in which the end of a turn is the id 256."""

    eos_token_id = 256
    all_special_tokens: tuple[str, ...] = ("<|im_end|>", "<|im_start|>", "<|eot_id|>")

    def __init__(self, chat_template: str | None = QWEN, eos_token: str = "<|im_end|>") -> None:
        self.chat_template, self.eos_token = chat_template, eos_token

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, tools: Any = None
    ) -> str:
        """Render the template as transformers does."""
        assert not tokenize and self.chat_template is not None
        environment = ImmutableSandboxedEnvironment()
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        return environment.from_string(self.chat_template).render(
            messages=conversation, add_generation_prompt=add_generation_prompt, tools=tools
        )

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the bytes of the text, with the end-of-turn token as one id."""
        parts = text.split(self.eos_token)
        ids = list(parts[0].encode())
        for part in parts[1:]:
            ids += [256, *part.encode()]
        return ids

    def decode(self, ids: Any) -> str:
        """Return the text of ids."""
        pieces = [self.eos_token.encode() if i == 256 else bytes([i]) for i in ids]
        return b"".join(pieces).decode()
