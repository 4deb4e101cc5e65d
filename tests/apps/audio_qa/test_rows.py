"""Rows: JSONL, CSV and folders in, and what is wrong with them."""

import json
from pathlib import Path

import pytest

from oscar_mm import InputError
from oscar_mm.apps.audio_qa import rows as rows_module
from oscar_mm.apps.audio_qa.rows import Row, by_recording, is_correct, read_rows, right_choices
from tests.apps.audio_qa.conftest import write_lines
from tests.prompts import tone
from tests.recordings import write_sound


def test_jsonl(tmp_path: Path) -> None:
    records = [
        {"id": "a", "audio": "call.wav", "question": "Who?", "answer": "Ann", "kind": "who"},
        {"id": 7, "image": ["a.png", "b/c.png"], "question": "Same?", "choices": ["yes", "no"]},
        {"video": "https://example.org/v.mp4", "question": "What?", "answer": [3, "three"]},
        {"id": "text", "question": "Why\u2028is it?"},
    ]
    file = write_lines(tmp_path / "q.jsonl", records)
    file.write_text("\ufeff" + file.read_text().replace("\\u2028", "\u2028").replace("\n", "\n\n"))
    rows = read_rows(file, group_by="kind")
    assert [row.id for row in rows] == ["a", "7", "5", "text"]
    assert rows[0].audio == (str(tmp_path / "call.wav"),) and rows[0].group == "who"
    assert rows[1].images == (str(tmp_path / "a.png"), str(tmp_path / "b/c.png"))
    assert rows[1].choices == ("yes", "no") and rows[1].answer == ()
    assert rows[2].videos == ("https://example.org/v.mp4",)
    assert rows[2].answer == ("3", "three")
    assert rows[3].media == {} and rows[3].question == "Why\u2028is it?"
    assert not any(row.error for row in rows)
    assert read_rows(records, group_by="kind")[0].audio == (str(Path.cwd() / "call.wav"),)


def test_csv(tmp_path: Path) -> None:
    file = tmp_path / "q.csv"
    file.write_text(
        "id,audio,question,choices,answer\n"
        'a,call.wav,"Who, then?","[""Ann"", ""Bob""]",Bob\n'
        'b,"[""x.wav"", ""y.wav""]","two\nlines",,\n'
    )
    first, second = read_rows(file)
    assert (first.question, first.choices, first.answer) == ("Who, then?", ("Ann", "Bob"), ("Bob",))
    assert second.audio == (str(tmp_path / "x.wav"), str(tmp_path / "y.wav"))
    assert second.question == "two\nlines" and second.choices == () == second.answer
    tabs = tmp_path / "q.tsv"
    tabs.write_text("id\taudio\na\tcall.wav\n")
    assert read_rows(tabs, question="Who?")[0].question == "Who?"


def test_folder(tmp_path: Path) -> None:
    for name in ("b.wav", "a.FLAC", "deep/c.mp3", "d.png", "e.mp4", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    rows = read_rows(tmp_path, question="What is it?")
    assert [row.id for row in rows] == ["a.FLAC", "b.wav", "d.png", "deep/c.mp3", "e.mp4"]
    assert [list(row.media) for row in rows][2:] == [["images"], ["audio"], ["videos"]]
    for name in ("a.webm", "b.mp4"):
        write_sound(tmp_path / name, tone(0.5))
    rows = read_rows(tmp_path, question="What is it?")
    assert [list(row.media) for row in rows if row.id in ("a.webm", "b.mp4")] == [["audio"]] * 2
    with pytest.raises(InputError, match="pass the question to ask"):
        read_rows(tmp_path)


EXAMPLE = '{"images": ["a.png"], "question": "What is it?"}'
DEEP = "[" * 60_000 + "]" * 60_000  # a cell of CSV may have 131,072 characters


def test_lines_that_are_no_rows(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    lines = [b'{"id": 2, "question": "?"}', b'{"id": 2,', b"[1]", DEEP.encode(), b'"\xff"', b""]
    lines += [b"9" * 5000, b'{"id": 1, "question": "?", "group": %s}' % (b"[" * 900 + b"]" * 900)]
    file.write_bytes(b"\n".join([*lines, b'{"question": "?", "group": null}']))
    rows = read_rows(file)
    assert [row.id for row in rows][:6] == ["2", "line 2", "line 3", "line 4", "line 5", "line 7"]
    assert [row.error for row in rows][:4] == [
        "",
        "is not valid JSON: Expecting property name enclosed in double quotes at character 11; "
        f"a line must be an object such as {EXAMPLE}",
        f"must be an object with fields, not list; for example {EXAMPLE}",
        "is nested too deeply",
    ]
    assert "is not valid UTF-8 text" in rows[4].error and "is not valid JSON" in rows[5].error
    # How deep is too deep depends on Python; whichever it is, it ends nothing.
    assert len(rows) == 8 and rows[6].id in ("1", "line 8")
    assert (rows[7].id, rows[7].error, rows[7].group) == ("9", "", "")
    table = tmp_path / "q.csv"
    table.write_text(f'id,question,choices\n1,?,\n2,?\n3,?,"[a, b]"\n4,?,"{DEEP}"\n5,?,,\n')
    found = [(row.id, row.error) for row in read_rows(table)]
    assert found == [
        ("1", ""),
        ("line 3", "does not have the 3 columns of the header"),
        ("3", """choices: '[a, b]' is not a JSON list such as ["a", "b"]"""),
        ("4", f"""choices: '{DEEP[:80]}' is not a JSON list such as ["a", "b"]"""),
        ("line 6", "does not have the 3 columns of the header"),
    ]
    [good, bad] = read_rows([{"question": "?"}, 3])
    assert (good.id, bad.id) == ("1", "row 2")
    assert bad.error.startswith("must be an object with fields, not int; for example {")


def test_a_line_too_long_for_memory_is_an_error(tmp_path: Path, monkeypatch) -> None:
    """At most two pieces of it are in memory; the lines around it are read."""
    monkeypatch.setattr(rows_module, "_LONGEST_LINE", 40)
    short = b'{"question": "?"}'
    fits, long = short.ljust(39) + b"\n", short.ljust(40) + b"\n"
    for lines, wrong in (
        ([fits, fits], []),
        ([short + b"\n", long, fits], [1]),
        ([long.rstrip() + b" " * 1000 + b"\n", b"\n", fits, b" " * 99], [0, 2]),
    ):
        file = tmp_path / "q.jsonl"
        file.write_bytes(b"".join(lines))
        rows = read_rows(file)
        assert [place for place, row in enumerate(rows) if row.error] == wrong
        for place in wrong:
            assert rows[place].error == "has more than 40 bytes; name media by path instead"
            assert rows[place].where == f"{file}, {rows[place].id}"


def test_cells_that_only_look_like_lists(tmp_path: Path) -> None:
    table = tmp_path / "q.csv"
    table.write_text("id,audio,question,notes\n[1],[2023] a.wav,[noise] what?,[checked]\n")
    [row] = read_rows(table)
    assert (row.error, row.id, row.question) == ("", "[1]", "[noise] what?")
    assert row.audio == (str(tmp_path / "[2023] a.wav"),)
    table.write_text('audio,question\n"[""a.wav"", ""b.wav""]",?\n')
    assert len(read_rows(table)[0].audio) == 2


def test_addresses_stay_what_they_are(tmp_path: Path) -> None:
    for source in ("s3://bucket/a.wav", "file:///a.wav", "https://host/a.wav"):
        file = tmp_path / "q.jsonl"
        file.write_text(json.dumps({"audio": source, "question": "?"}))
        assert read_rows(file)[0].audio == (source,)


def test_ids_that_are_given_go_before_invented_ones(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(
        '{"id": 2, "question": "a"}\n{"question": "b"}\n[]\n{"id": "line 3", "question": "c"}\n'
        '{"question": "d"}\n{"id": "5", "question": "e"}\n{"id": "line 5", "question": "f"}\n'
    )
    rows = read_rows(file)
    expected = ["2", "line 2", "line 3 (2)", "line 3", "line 5 (2)", "5", "line 5"]
    assert [row.id for row in rows] == expected
    assert [row.question for row in rows] == ["a", "b", "", "c", "d", "e", "f"]
    assert not any(row.error for row in rows if row.question)


def test_an_id_that_occurs_twice_is_an_error_of_its_row(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    lines = [{"id": 5}, {"id": "5"}, {"id": "5 (line 2)"}, {"id": 5.0}, {"id": 5}]
    file.write_text("".join(json.dumps(line | {"question": "?"}) + "\n" for line in lines))
    rows = read_rows(file)
    expected = ["5", "5 (line 2) (2)", "5 (line 2)", "5.0", "5 (line 5)"]
    assert [row.id for row in rows] == expected
    assert [bool(row.error) for row in rows] == [False, True, False, False, True]
    for row in (rows[1], rows[4]):
        assert row.error == f"id '5' already occurs at {file}, line 1; give each row its own id"
    [_, twice] = read_rows([{"id": "a", "question": "?"}, {"id": "a", "question": "!"}])
    assert (twice.id, twice.question, bool(twice.error)) == ("a (row 2)", "!", True)


def test_ids_as_they_come_back() -> None:
    values = ["\ud800", "\ud83d\ude00", 7, 1.5, True]
    rows = read_rows([{"id": value, "question": "?"} for value in values])
    assert [row.id for row in rows] == ["\ud800", "\N{GRINNING FACE}", "7", "1.5", "True"]
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    [row] = read_rows([{"id": deep, "question": "?"}])
    assert (row.id, row.error) == ("1", "id must be text or a number")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("q.jsonl", f"\n{DEEP}\n", r"q.jsonl, line 2: is nested too deeply"),
        ("q.jsonl", '{"id": 2,\nno\n', r"q.jsonl, line 1: is not valid JSON: .* at character 11"),
        ("q.jsonl", "\n[1]\n", r"q.jsonl, line 2: must be an object with fields, not list"),
        ("q.jsonl", "\n", "contains no questions"),
        ("q.csv", "id,question\n1\n", r"q.csv, line 2: does not have the 2 columns"),
        ("q.csv", "id,question\n1,?,3\n", r"q.csv, line 2: does not have the 2 columns"),
        ("q.csv", "id\n", "contains no questions"),
        (
            "q.csv",
            'id,question\n1,?\n2,"a"b\n',
            r"q.csv, after line 2: not valid CSV: .* expected after",
        ),
    ],
)
def test_files_that_are_refused(name: str, text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=expected):
        read_rows(tmp_path / name)


def test_other_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        read_rows(tmp_path / "gone.jsonl")
    for name in ("q.jsonl", "q.csv"):
        (tmp_path / name).write_bytes(b'{"id": "\xff\xfe"}\n')
        with pytest.raises(InputError, match="UTF-8"):
            read_rows(tmp_path / name)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({}, "question must be non-empty text"),
        ({"question": 3}, "question must be non-empty text"),
        ({"question": " "}, "question must be non-empty text"),
        ({"question": "?", "choices": ["one"]}, "two or more different texts"),
        ({"question": "?", "choices": ["a", "a"]}, "two or more different texts"),
        ({"question": "?", "choices": {"a": 1}}, "choices must be text"),
        ({"question": "?", "audio": [3]}, "audio must be text"),
        ({"question": "?", "answer": [None]}, "answer must be text"),
    ],
)
def test_rows_that_cannot_be_asked(record: dict, expected: str) -> None:
    [row] = read_rows([{"id": "x"} | record])
    assert row.id == "x" and expected in row.error


def test_groups_and_digests() -> None:
    fields = [{"audio": "a.wav"}, {"audio": "b.wav"}, {"audio": ["a.wav"]}, {"images": "a.wav"}]
    rows = read_rows([{"id": i, "question": "?"} | one for i, one in enumerate(fields)])
    assert [[row.id for row in group] for group in by_recording(rows)] == [["0", "2"], ["1"], ["3"]]
    assert rows[0].digest == rows[2].digest != rows[1].digest
    assert rows[0].digest != Row("0", "!", audio=rows[0].audio).digest
    # A folder that was moved asks the same.
    assert Row("0", "?", audio=("/elsewhere/a.wav",)).digest == rows[0].digest


def test_marking() -> None:
    free = Row("a", "?", answer=("Two dogs.", "2"))
    assert is_correct(free, " two  DOGS", None) and is_correct(free, "2!", None)
    assert is_correct(free, "two", None) is False
    assert is_correct(Row("a", "?"), "two", None) is None
    assert is_correct(Row("a", "?", answer=("!",)), "!", None)
    row = Row("a", "?", choices=("Ann", "Bob", "b"), answer=("bob",))
    assert right_choices(row) == {1} and is_correct(row, "", 1) and not is_correct(row, "", 2)
    # A letter that is a choice itself is that one, any other is a place.
    assert right_choices(Row("a", "?", choices=row.choices, answer=("B", "a"))) == {2, 0}
    for answer in ("D", "Eve", "ß"):
        with pytest.raises(InputError, match="not one of the choices"):
            right_choices(Row("a", "?", choices=row.choices, answer=(answer,)))
