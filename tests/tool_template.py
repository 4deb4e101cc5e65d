"""A chat template that writes tools, calls and results between tags, as Qwen3's do."""

from tests.tiny_qwen3_vl import QWEN3_VL_TEMPLATE

_TOOLS = """
{%- if tools -%}
{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' -%}{{ render(messages[0].content) + '\\n\\n' }}{%- endif -%}
{{ 'Tools:\\n<tools>' }}
{%- for tool in tools -%}{{ '\\n' + (tool | tojson) }}{%- endfor -%}
{{ '\\n</tools><|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and tools and loop.first -%}
{%- elif message.role == 'tool' -%}
{%- set first = loop.first or messages[loop.index0 - 1].role != 'tool' -%}
{%- if first -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\\n<tool_response>\\n' + render(message.content) + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
{%- elif message.tool_calls -%}
{{ '<|im_start|>assistant\\n' + render(message.content) }}
{%- for call in message.tool_calls -%}
{{ '' if loop.first and not message.content else '\\n' }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string
    else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- else -%}
""".strip()
_LOOP, _END = "{%- for message in messages -%}", "{%- endfor -%}\n{%- if add_generation_prompt"


def with_tools(template: str) -> str:
    """The template of a tiny Qwen model, with tools."""
    return template.replace(_LOOP, _TOOLS, 1).replace(_END, "{%- endif -%}\n" + _END, 1)


TOOL_TEMPLATE = with_tools(QWEN3_VL_TEMPLATE)
FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
"""A tool, as requests offer it."""
CALL = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
"""A call of it, as the model writes it."""
