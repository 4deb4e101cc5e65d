"""`make demo` runs a program that is there; pip shows its progress."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()


def test_the_demo_is_an_example() -> None:
    [program] = re.findall(r"^demo:.*\n\t.*/python (\S+)$", MAKEFILE, re.MULTILINE)
    # tests/examples/test_programs.py runs it.
    assert program == "examples/first_run.py" and (ROOT / program).is_file()


def test_no_install_is_without_a_word() -> None:
    assert "pip install" in MAKEFILE
    assert not re.search(r"pip install.*(--quiet|-q\b)", MAKEFILE)
