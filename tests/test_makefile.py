"""`make demo` asks what it says, and what it calls right is right."""

import re
from glob import glob
from pathlib import Path

import pytest

from oscar_mm.cli import run

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
VARIABLES = dict(re.findall(r"^(CARDS|CLIPS) := (.*)$", MAKEFILE, re.MULTILINE))
ASKED = re.findall(r"^\t\$\(call ask,(.*),(.*),(.*)\)$", MAKEFILE, re.MULTILINE)


def test_it_asks() -> None:
    assert len(ASKED) == 3 and len(VARIABLES) == 2
    command = 'oscar-mm ask $(1) --dtype bfloat16 --prompt "$(2)"'
    assert MAKEFILE.count(command) == 2  # said and done


@pytest.mark.parametrize(("media", "question", "right"), ASKED)
def test_the_answer_is_right(media, question, right, monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    for name, value in VARIABLES.items():
        media = media.replace(f"$({name})", value)
    files = [file for pattern in media.split() for file in sorted(glob(pattern))]
    assert len(files) >= 10
    options = ["--prompt", question, "--dtype", "bfloat16", "--device", "cpu"]
    assert run(["ask", *files, *options]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{right}\n"
    name = "pocket-omni" if files[0].endswith(".wav") else "pocket-vl"
    first = captured.err.splitlines()[0]
    assert first.startswith(
        f"oscar-mm: no --model given, so this is {name}, a tiny demo model that"
    )
    assert "KV cache" in captured.err
