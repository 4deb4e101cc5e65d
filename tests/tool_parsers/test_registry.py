"""The format that a chat template asks for."""

import pytest

from oscar_mm.tool_parsers.registry import format_of

QWEN3 = r"""
{%- if tools %}{{- "# Tools\n\n<tools>" }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- "</tools>\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n" }}
{%- endif %}
"""
CODER = r"""
{{- '<tool_call>\n<function=example>\n<parameter=one>\nvalue\n</parameter>\n</function>' }}
{{- '<function=' + tool_call.name + '>' }}
"""


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (QWEN3, "hermes"),
        ('{{ \'<tool_call>\\n{"name": "\' + call.name }}', "hermes"),
        (CODER, "qwen3_coder"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        (
            '{{ \'Respond in the format {"name": function name, "parameters": ...}\' }}',
            "llama3_json",
        ),
        ("{{ 'Use exact format: [func_name1(param1=value1), func_name2(...)]' }}", "pythonic"),
        # Others write tags of the same name around something else.
        ("{{ '<tool_call>{function}\\n<arg_key>{key}</arg_key>' }}", None),
        ("{{ message.content }}", None),
    ],
)
def test_format_of(template: str, name: str | None) -> None:
    found = format_of(template)
    assert (found and found.name) == name
