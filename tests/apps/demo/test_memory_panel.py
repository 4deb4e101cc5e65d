"""Numbers and charts of the page: what they show is what was measured."""

import json
import re
from dataclasses import replace

import pytest

from oscar_mm.admission.capacity import ModelShape
from oscar_mm.apps.demo.charts import Line, chart, inspection_view
from oscar_mm.apps.demo.measured_chat import MemoryCurve
from oscar_mm.apps.demo.memory_panel import (
    LENGTHS,
    MODELS,
    capacity,
    comparison_view,
    curve_events,
    format_label,
    mark_differences,
    memory_panel,
    memory_report,
    memory_view,
    scale_mix,
    segments_view,
    status_view,
)
from oscar_mm.apps.demo.visitor_input import AS_PRESET, SessionSettings
from oscar_mm.cache.memory import MemoryReport
from oscar_mm.engine.answer import Timings
from oscar_mm.modality import Modality
from oscar_mm.policy import KVPolicy
from oscar_mm.sizes import GPUS, format_bytes
from tests.apps.demo.conftest import asked

BITS = {one.label: AS_PRESET for one in Modality}


def report(text: int, image: int) -> MemoryReport:
    """Return a report with these bytes of text and image, a quarter of the bytes in bfloat16."""
    return MemoryReport(
        kv_bytes=text + image + 50 + 1000,
        bf16_bytes=4 * (text + image + 50),
        values=2 * (text + image + 50),
        by_modality={"text": text, "image": image, "video": 0, "audio": 0, "shared": 1050},
        by_kind={"tables": 50, "unused": 1000},
        tokens={"text": 10, "image": 20, "video": 0, "audio": 0},
    )


def paths(html: str) -> dict[str, list[list[float]]]:
    """Points of each path, by its colour."""
    found = re.findall(r'class="(?:area|line|line dashed) c-(\w+)" d="M([^"Z]*)', html)
    return {
        name: [[float(x) for x in point.split()] for point in points.split("L")]
        for name, points in found
    }


def test_free_slots_of_the_server_do_not_count() -> None:
    curve = MemoryCurve()
    curve.add(report(300, 650), 30)
    assert curve.last.used_bytes == 1000 and curve.last.ratio == 4.0
    assert curve.last.bits_per_value == 4.0 and curve.last.stored_tokens == 30


def test_a_long_curve_stays_small_and_keeps_its_ends() -> None:
    curve = MemoryCurve()
    for tokens in range(1, 5000):
        curve.add(report(tokens, 0), tokens)
    assert len(curve.samples) <= 1200
    assert (curve.samples[0].tokens, curve.last.tokens) == (0, 4999)
    thin = curve.thinned(100)
    assert len(thin) <= 102 and thin[0].tokens == 0 and thin[-1] is curve.last
    curve.cut(100)
    assert curve.last.tokens <= 100


def test_the_chart_stacks_modalities_below_the_line_of_16_bit() -> None:
    curve = MemoryCurve()
    curve.add(report(300_000, 650_000), 400)
    html = memory_panel(curve, Timings(0.25, 1.0, 31.0))
    drawn = paths(html)
    assert list(drawn) == ["text", "image", "tables", "plain"]
    top = 4_000_000
    for name, height in (("text", 300e3), ("image", 950e3), ("tables", 950_050), ("plain", 3.8e6)):
        x, y = drawn[name][1]
        assert x == 100 and y == pytest.approx(100 - 100 * height / top, abs=0.01)
    headline = "<strong>4.0x smaller than 16-bit</strong>: <b>950.05 KB</b> instead of 3.80 MB"
    for shown in (headline, "4.00", "31", "0.25 s", "30 tokens"):
        assert shown in html
    other = MemoryCurve()
    other.add(report(2_000_000, 0), 400)
    assert "other" in paths(memory_panel(curve, None, other))


def test_no_conversation_takes_more_than_16_bit_without_a_reason(session, uploads) -> None:
    assert "Nothing is stored yet" in memory_view(session)
    asked(session, "What?", uploads / "0.png")
    assert session.conversation.curve.last.ratio < 1
    reason = "too short to benefit"
    assert reason in memory_view(session) and reason in json.loads(memory_report(session))["note"]
    session.begin(SessionSettings.of_fields("bf16", BITS, 32, None, False))
    asked(session, "What?", uploads / "0.png")
    assert "stored in 16-bit precision, as set" in memory_view(session)


def test_the_curve_says_what_was_shown_and_forgotten_and_its_values(session, uploads) -> None:
    asked(session, "What?", uploads / "0.png", uploads / "1.png", uploads / "tone.wav")
    asked(session, "And?")
    session.forget(1)
    session.forget(1)
    tokens, curve = session.conversation.tokens, session.conversation.curve
    events = [(event.x, event.text) for event in curve_events(session.conversation)]
    assert events == [
        (0, "2 pictures, 1 clip shown at 0 tokens"),
        (tokens, f"0.png forgotten at {tokens:,} tokens"),
    ]
    html = memory_view(session)
    assert html.count('class="event"') == 2 and html.count("data-text=") == len(curve.samples)
    used = format_bytes(curve.last.used_bytes)
    assert f'data-text="{tokens:,} tokens: {used}, ' in html
    session.undo()
    assert len(curve_events(session.conversation)) == 1


def test_axes_end_on_round_numbers() -> None:
    for highest in (1, 3, 7.3, 99, 101, 123_456, 5e9):
        html = chart(
            [Line("a", "c-text", [(0, 0), (10, highest)])],
            title="t",
            summary="s",
            x_label="x",
            show_y=lambda value: f"{value:g}",
        )
        labels = [float(one) for one in re.findall(r"<i>([^<]*)</i>", html)]
        assert len(labels) == 5 and labels[0] == 0
        assert highest * 0.999 <= labels[-1] <= 2 * highest


def test_words_that_differ_are_marked() -> None:
    assert mark_differences("code 7KQ2, red", "code 7KQ3, red") == (
        "code <mark>7KQ2</mark>, red",
        "code <mark>7KQ3</mark>, red",
    )
    assert mark_differences("same", "same") == ("same", "same")
    assert mark_differences("", "more here")[1] == "<mark>more here</mark>"


def test_both_answers_to_every_question_are_compared(session, uploads) -> None:
    session.begin(SessionSettings.of_fields("compact", BITS, 32, None, True))
    asked(session, "First?", uploads / "0.png")
    asked(session, "Second?")
    session.exchanges[0].baseline = session.exchanges[0].answer + " more"
    html = comparison_view(session)
    assert html.index("Second?") < html.index("First?") and html.count("<mark>") == 1
    assert "1 of 2 answers are the same. Marked words differ." in html
    for chat in (session.conversation, session.baseline):
        assert f"<b>{format_bytes(chat.curve.last.used_bytes)}</b>" in html
        assert f"{chat.timings.tokens_per_s:.0f} tokens/s" in html
    session.baseline.timings = replace(session.baseline.timings, tokens_per_s=0.0)
    assert "<footer>- tokens/s" in comparison_view(session)
    assert "too short to benefit" in html
    session.undo()
    assert "Second?" not in comparison_view(session)
    for _ in range(25):
        session.exchanges.append(session.exchanges[0])
    assert comparison_view(session).count("<article") == 20


def test_how_many_fit_follows_the_formula() -> None:
    policy, shape = KVPolicy.preset("compact"), MODELS["Qwen3-VL-8B"]
    mix = {"text": 100, "image": 700}
    html = capacity(mix, policy, "H100", "Qwen3-VL-8B", shape, "32K tokens")
    tokens = scale_mix(mix, 32768)
    assert sum(tokens.values()) == 32768 and tokens["image"] == 28672
    packed = shape.conversations(80e9, policy, tokens)
    whole = shape.conversations(80e9, KVPolicy.preset("bf16"), tokens)
    assert f"<strong>{packed:,}</strong>" in html and f"<b>{whole:,}</b>" in html
    assert "with Qwen3-VL-8B fit on one H100" in html
    large = "Qwen3-VL-32B"
    html = capacity({}, policy, "RTX 4090", large, MODELS[large], "this long")
    assert f"weights of {large}, 66.80 GB, leave no memory on one RTX 4090" in html


def test_formats_are_named_by_bits_and_ratio() -> None:
    labels = {name: format_label(name, MODELS["Qwen3-VL-8B"]) for name in KVPolicy.preset_names()}
    assert labels["bf16"] == "bf16: 16 bits" and labels["standard"].startswith(
        "standard: 3/2 bits, "
    )
    assert re.fullmatch(r"compact: 2 bits, 6\.\dx smaller", labels["compact"])


def test_every_choice_of_the_planner_works() -> None:
    for gpu in GPUS:
        for shape in (*MODELS.values(), ModelShape(4, 2, 128, 5_000_000)):
            for length in LENGTHS:
                policy = KVPolicy.preset("oscar")
                assert capacity({"text": 3}, policy, gpu, "a model", shape, length)


def test_views_of_a_conversation(session, uploads) -> None:
    assert "Start comparing" in comparison_view(session)
    assert "listed here" in segments_view(session)
    session.begin(SessionSettings.of_fields("compact", BITS, 32, None, True))
    assert "next answer is compared" in comparison_view(session)
    asked(session, "What?", uploads / "0.png", uploads / "tone.wav")
    table = segments_view(session)
    assert re.findall('data-show="([^"]*)', table) == ["picture 1", "clip 1"]
    assert table.count("<button") == 2 and 'aria-label="Forget tone.wav"' in table
    assert table.count("<img") == 1 and table.count("waveform of") == 1
    session.forget(1)
    table = segments_view(session)
    assert table.count("<button") == 1 and "forgotten" in table
    asked(session, "And?", uploads / "1.png")
    assert "picture 2" in segments_view(session), "the number in questions"
    compared = comparison_view(session)
    assert compared.count("<section>") == 2 and 'role="status"' in compared
    assert "bits: text 2, image 2" in status_view(session)
    assert "other" in paths(compared)
    assert set(paths(memory_view(session))) >= {"text", "image", "audio", "plain", "other"}


def test_the_report_has_numbers_and_nothing_that_was_said(session, uploads) -> None:
    asked(session, "My secret question", uploads / "0.png")
    text = memory_report(session)
    found = json.loads(text)
    assert "secret" not in text and "0.png" not in text
    assert found["memory"] == session.conversation.chat.memory.to_dict()
    assert found["policy"]["bits"] == {one.label: [2, 2] for one in Modality}
    assert [one["modality"] for one in found["segments"]] == ["text", "image"]
    assert found["dtype"] == "bfloat16" and found["timings"]["prefill_s"] > 0


def test_why(session, uploads) -> None:
    asked(session, "What?", *(uploads / f"{index}.png" for index in range(3)))
    inspection = session.inspection()
    html = inspection_view(inspection)
    assert html.count("<figure") == (4 if inspection.has_pages else 3)
    medians = [layer.norms.tokens["image"].median for layer in inspection.layers]
    top = [float(one) for one in re.findall(r"<i>([^<]*)</i>", html)][4]
    drawn = [point[1] for point in paths(html.split("</figure>")[0])["image"]]
    assert drawn == [pytest.approx(100 - 100 * one / top, abs=0.01) for one in medians]
