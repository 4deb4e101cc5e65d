"""Answers as HTML: what is a formula and what is a price, and colours in code."""

import re
import time
from html import unescape

import pytest

from oscar_mm.apps.demo.answer_markdown import markdown
from oscar_mm.apps.demo.formulas import MAX_CHARACTERS, script


def formulas(text: str) -> list[str]:
    return [unescape(one) for one in re.findall(r'data-tex="([^"]*)"', markdown(text))]


def shown(text: str) -> str:
    """Text of the HTML."""
    return unescape(re.sub("<[^>]*>", "", markdown(text)))


PRICES = (
    *("It costs $5 and $6.", "$5-$6, $5/$6, $5 -- $6 or $5, $6", "US$5 and 10$ more", "5$-6$"),
    *("$5 or 6$", "$5和6$", "$5 (US$)", "$5M (vs. $4M)", "from $10k to $20k", "$1,000$"),
    *("restaurants: $$ to $$$", "It costs $$5 and $$6", "PATH=$PATH:$HOME", "$a and $b", "$ x $"),
    *("$i < $n", "It costs $5.\nIt costs $6.", "$5 a day, 6$ a night", "$", "$$", "$$$$", r"\(\)"),
)


@pytest.mark.parametrize("text", PRICES)
def test_prices_are_no_formulas(text: str) -> None:
    assert formulas(text) == []
    assert shown(text).replace("()", r"\(\)") == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"by \(a^2+b^2=c^2\) and \[ x \]", ["a^2+b^2=c^2", "x"]),
        ("$x$, $2x$, $f(x)=1$, $5x + 3 = 2$", ["x", "2x", "f(x)=1", "5x + 3 = 2"]),
        (r"$\text{speed of light} = c$ and $x_{max}$", [r"\text{speed of light} = c", "x_{max}"]),
        ("**$y_1$** and $y_2 * z$", ["y_1", "y_2 * z"]),
        (r"It costs $5, so $n=2$ cost \$10.", ["n=2"]),
        (r"$a\$b^2$", [r"a\$b^2"]),
        ("sum:\n\\[\nx = 5\n- 3\n\\]\nend", ["x = 5\n- 3"]),
        ("$$\n\\frac{1}{2}\n\n+ 1\n$$", ["\\frac{1}{2}\n\n+ 1"]),
        ("- one:\n  \\[ x \\]\n- two\n\n> \\[ y \\]\n> z", ["x", "y"]),
        ("| a |\n|---|\n| $x^2$ |", ["x^2"]),
        ("`$x$` and ``\\(x\\)``\n```\n$x$\n```\n\n    \\[ x \\]", []),
        ("\\[ x", []),
        (f"\\({'x' * MAX_CHARACTERS}\\)", []),
        (r"\(<img src=x onerror=\"alert(1)\">\)", [r"<img src=x onerror=\"alert(1)\">"]),
    ],
)
def test_formulas(text: str, expected: list[str]) -> None:
    assert formulas(text) == expected
    assert "<img" not in markdown(text)


def test_a_formula_shows_its_source_until_it_is_drawn() -> None:
    text = "so $x^2$\n\n\\[\ny\n\\]"
    assert shown(text) == "so $x^2$\n\\[\ny\n\\]"
    assert 'div class="formula display"' in markdown(text)


def test_the_page_can_load_what_draws_formulas() -> None:
    assert re.search(r'of \["assets/katex-[^"]*\.js"', script())
    assert re.search(r'of \["assets/katex-[^"]*\.css"', script())


def test_code_has_colours_once_it_is_written() -> None:
    code = "def f(x):\n    return '<b>'  # twice\n"
    block = f"```python\n{code}```"
    html = markdown(block)
    assert '<span class="code-k">def</span>' in html and "<b>" not in html
    assert [name in html for name in ('"code-nf">f<', '"code-c1"># twice<')] == [True, True]
    assert shown(block).strip() == code.strip()
    for text in (block[:-3], f"```\n{code}```", f"```nolanguage\n{code}```", f"```{code * 999}```"):
        assert "code-k" not in markdown(text)
    nested = markdown("- so\n  ```Python title='a'\n  import x\n  ```\n- end")
    assert '"code-kn">import<' in nested


@pytest.mark.parametrize(
    ("language", "code"),
    [("java", "\n" * 9999), ("cs", "a\n " * 3000), ("css", '"\\' * 4000), ("ts", "a." * 4000)],
)
def test_code_that_is_slow_to_read_stays_without_colours(language: str, code: str) -> None:
    """The lexers of these languages take seconds to read this code."""
    began = time.thread_time()
    text = f"```{language}\n{code}\n```"
    assert shown(text).strip() == code.strip()
    assert time.thread_time() - began < 1


@pytest.mark.parametrize("piece", ["\\(", "$$x\n", "$a ", "\\[\n", "$", "\\[ x\n"])
def test_a_long_answer_full_of_beginnings(piece: str) -> None:
    began = time.thread_time()
    markdown(piece * 5000)
    assert time.thread_time() - began < 5
