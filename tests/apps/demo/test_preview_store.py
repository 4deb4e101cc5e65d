"""Previews of media by content and name, bounded."""

from oscar_mm.apps.demo import preview_store as module
from oscar_mm.apps.demo.preview_store import PreviewStore
from oscar_mm.modality import MediumSpan, Modality


def span(name: str, digest: str) -> MediumSpan:
    return MediumSpan(Modality.IMAGE, name, 0, 4, digest)


def test_content_and_name_have_to_agree() -> None:
    store = PreviewStore()
    store.add([span("a.png", "1")], ["<img>"])
    assert store.preview(span("a.png", "1")).html == "<img>"
    assert store.html(span("a.png", "2")) == store.html(span("b.png", "1")) == ""


def test_the_oldest_go(monkeypatch) -> None:
    monkeypatch.setattr(module, "_MAX_CHARACTERS", 100)
    store, spans = PreviewStore(), [span("a.png", str(index)) for index in range(20)]
    for one in spans:
        store.add([one], ["x" * 10])
        store.add([one], ["x" * 10])
    assert [bool(store.html(one)) for one in spans] == [False] * 10 + [True] * 10
