"""Media of requests: options of them, media named by uuid, hosts from which they are fetched."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from oscar_mm import InputError, OscarVLPipeline
from oscar_mm.apps.serve.command import media_domains
from oscar_mm.apps.serve.conversations import _keys
from oscar_mm.apps.serve.field_error import FieldError
from oscar_mm.apps.serve.known_media import KnownMedia, KnownMedium
from oscar_mm.apps.serve.media_parts import NOT_FETCHED, MediaSource
from oscar_mm.apps.serve.protocol import ApiRequest, Body, parsed, read_request
from oscar_mm.apps.serve.vllm_server import vllm_arguments, vllm_command
from oscar_mm.media import MediaLimits
from oscar_mm.media.options import MediaOptions
from oscar_mm.media.source import AllowedHosts, NamedBytes
from oscar_mm.modality import Modality
from tests.apps.serve.conftest import encoded, image, openai, png, served, sound, text, user, wav
from tests.prompts import clip
from tests.recordings import write_movie

LIMITS = MediaLimits()


def read(*parts: dict[str, Any], source: MediaSource | None = None, **options: Any) -> ApiRequest:
    body = json.dumps({"messages": [user(*parts, text("?"))], **options}).encode()
    return read_request(parsed(Body, body), source or MediaSource(LIMITS))


def refused(
    *parts: dict[str, Any], source: MediaSource | None = None, **options: Any
) -> FieldError:
    with pytest.raises(FieldError) as caught:
        read(*parts, source=source, **options)
    return caught.value


@pytest.fixture(scope="module")
def movie(tmp_path_factory) -> bytes:
    return write_movie(tmp_path_factory.mktemp("m") / "a.mp4", clip(16), None).read_bytes()


def video(data: bytes, **options: Any) -> dict[str, Any]:
    uri = f"data:video/mp4;base64,{encoded(data)}"
    return {"type": "video_url", "video_url": {"url": uri}, **options}


# Options.


def test_options_of_a_part_and_of_a_request(movie) -> None:
    low = image(png())
    low["image_url"]["detail"] = "low"
    parts = [low, image(png()) | {"max_pixels": 9000}, video(movie, nframes=4), video(movie, fps=1)]
    [message] = read(
        *parts,
        mm_processor_kwargs={"max_pixels": 50_000, "fps": 3, "do_sample_frames": True},
        media_io_kwargs={"video": {"num_frames": 6}, "image": {}},
    ).question
    assert [one.options for one in message.media] == [
        MediaOptions(detail="low", max_pixels=50_000),
        MediaOptions(max_pixels=9000),
        MediaOptions(num_frames=4, max_pixels=50_000),
        MediaOptions(fps=1, max_pixels=50_000),
    ]
    [message] = read(video(movie), mm_processor_kwargs={"use_audio_in_video": True}).question
    assert message.media[0].sound and message.media[0].options == MediaOptions()
    original = image(png())
    original["image_url"]["detail"] = "original"
    [message] = read(original).question
    assert message.media[0].options == MediaOptions()


@pytest.mark.parametrize(
    ("options", "field", "expected"),
    [
        (
            {"mm_processor_kwargs": {"size": 5}},
            "mm_processor_kwargs",
            "size is not supported: leav",
        ),
        ({"mm_processor_kwargs": {"fps": "2"}}, "mm_processor_kwargs", "fps='2': must be a number"),
        ({"mm_processor_kwargs": {"fps": 1, "num_frames": 2}}, "mm_processor_kwargs", "only one"),
        ({"mm_processor_kwargs": {"max_pixels": 1e400}}, "mm_processor_kwargs", "max_pixels=inf"),
        (
            {"mm_processor_kwargs": {"fps": 10**400}},
            "mm_processor_kwargs",
            "must be a number below",
        ),
        ({"mm_processor_kwargs": {"do_resize": False}}, "mm_processor_kwargs", "do_resize is not"),
        ({"mm_processor_kwargs": {"use_audio_in_video": 1}}, None, "must be true or false"),
        (
            {"media_io_kwargs": {"smell": {}}},
            "media_io_kwargs.smell",
            "must be one of image, video",
        ),
        (
            {"media_io_kwargs": {"image": {"fps": 2}}},
            "media_io_kwargs.image",
            "fps is not supported",
        ),
        ({"media_io_kwargs": {"video": 5}}, "media_io_kwargs.video", "must be an object"),
    ],
)
def test_options_that_are_refused(options, field: str | None, expected: str) -> None:
    error = refused(image(png()), **options)
    assert expected in str(error) and field in (None, error.field)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (image(png()) | {"fps": 2}, "fps is not an option of image: leave it out"),
        (sound(wav(0.1)) | {"max_pixels": 9}, "max_pixels is not an option of audio"),
        (image(png()) | {"max_pixels": 0}, "max_pixels=0: must be at least 1"),
        (image(png()) | {"max_pixels": 10**400}, "must be a whole number below 2^63"),
        (
            image(png()) | {"min_pixels": 9, "max_pixels": 8},
            "min_pixels=9 must not be more than max_pixels=8",
        ),
    ],
)
def test_options_of_a_part_that_are_refused(part, expected: str) -> None:
    error = refused(part)
    assert expected in str(error) and error.field == "messages[0].content[0]"


def test_conversations_differ_by_options(movie) -> None:
    """A later request must not continue a chat that has read the media in another way."""
    said = {"role": "assistant", "content": "It is."}

    def key(part: dict[str, Any], **options: Any) -> str:
        messages = [user(part, text("?")), said, user("Sure?")]
        body = json.dumps({"messages": messages, **options}).encode()
        request = read_request(parsed(Body, body), MediaSource(LIMITS))
        return _keys(request, request.past)[-1]

    keys = [
        key(video(movie)),
        key(video(movie, fps=1)),
        key(video(movie), mm_processor_kwargs={"max_pixels": 9000}),
        key(video(movie), mm_processor_kwargs={"use_audio_in_video": True}),
    ]
    assert len({*keys}) == len(keys)
    assert keys[1] == key(video(movie), mm_processor_kwargs={"fps": 1})


def test_a_server_reads_fewer_tokens_where_it_is_asked_to(omni, client, movie) -> None:
    def tokens(*parts: dict[str, Any], **more: Any) -> int:
        messages: Any = [user(*parts, text("What?"))]
        asked = {"model": "tiny", "messages": messages, "max_tokens": 1}
        return client.chat.completions.create(**asked, extra_body=more).usage.prompt_tokens

    usual = tokens(image(png()), video(movie))
    small = {"min_pixels": 1024, "max_pixels": 1024}
    assert tokens(image(png()), video(movie), mm_processor_kwargs=small) < usual
    assert tokens(image(png()) | small, video(movie)) < usual
    assert tokens(image(png()), video(movie, nframes=2)) < usual
    large = omni.limits.max_image_pixels + 1
    over = "is more than the limit of 50,000,000; lower it"
    with pytest.raises(openai.BadRequestError, match=over):
        tokens(image(png()), mm_processor_kwargs={"max_pixels": large})
    # The Responses API has the detail of an image, and the same options beside the input.
    uri = image(png())["image_url"]["url"]
    shown = [{"type": "input_image", "image_url": uri, "detail": "low"}]
    asked = {"model": "tiny", "input": [{"role": "user", "content": shown}], "max_output_tokens": 1}
    response = client.responses.create(**asked, extra_body={"mm_processor_kwargs": small})
    whole = client.responses.create(**asked)
    assert response.usage.input_tokens < whole.usage.input_tokens


def test_a_family_without_options(llava_next_folder) -> None:
    llava = OscarVLPipeline(llava_next_folder, device="cpu")
    with (
        served(llava) as where,
        openai.OpenAI(base_url=f"{where}/v1", api_key="any", max_retries=0) as client,
    ):

        def ask(part: dict[str, Any], **more: Any) -> Any:
            asked: Any = {"model": "tiny", "messages": [user(part, text("?"))], "max_tokens": 1}
            return client.chat.completions.create(**asked, extra_body=more)

        low = image(png())
        low["image_url"]["detail"] = "low"
        assert ask(low).choices
        for more, expected in (
            (
                {"mm_processor_kwargs": {"fps": 2}},
                "fps: LLaVA-NeXT does not support this option; it",
            ),
            (
                {"mm_processor_kwargs": {"use_audio_in_video": True}},
                "LLaVA-NeXT does not accept audio",
            ),
        ):
            with pytest.raises(openai.BadRequestError, match=expected) as caught:
                ask(image(png()), **more)
            assert caught.value.param == "mm_processor_kwargs"
        with pytest.raises(openai.BadRequestError, match="this model does not support max_pixels"):
            ask(image(png()) | {"max_pixels": 9000})


# Media by uuid.


def named(part: dict[str, Any], uuid: str) -> dict[str, Any]:
    return part | {"uuid": uuid}


def again(kind: str, uuid: str) -> dict[str, Any]:
    return {"type": kind, kind: None, "uuid": uuid}


def source(known: KnownMedia | None = None) -> MediaSource:
    return MediaSource(LIMITS, known=known or KnownMedia())


def shown(request: ApiRequest) -> list[tuple[str, bytes]]:
    return [(one.modality.label, one.source) for one in request.question[0].media]


def test_a_known_medium_need_not_be_sent_again(movie) -> None:
    kept = source()
    wave, pixels = wav(0.1), png()
    file = {"type": "file", "file": {"file_data": f"data:audio/wav;base64,{encoded(wave)}"}}
    read(
        *(named(image(pixels), "a"), named(sound(wave), "b"), named(video(movie), "c")),
        *(named(file, "d"), image(png(1))),
        source=kept,
    )
    request = read(
        *(again("video_url", "c"), again("image_url", "a"), again("input_audio", "b")),
        *(again("audio_url", "d"), again("file", "a"), again("image_url", "a")),
        source=kept,
    )
    assert shown(request) == [
        *(("video", movie), ("image", pixels), ("audio", wave)),
        *(("audio", wave), ("image", pixels), ("image", pixels)),
    ]
    # vLLM's clients also send empty objects.
    empty = [again("image_url", "a"), again("input_audio", "b"), again("file", "d")]
    empty = [part | {part["type"]: {}} for part in empty]
    assert shown(read(*empty, source=kept)) == [("image", pixels), ("audio", wave), ("audio", wave)]
    # A part without uuid is still nothing, and options are a request's own.
    part = again("image_url", "a") | {"max_pixels": 9000}
    [message] = read({"type": "image_url", "image_url": None}, part, source=kept).question
    assert [one.options for one in message.media] == [MediaOptions(max_pixels=9000)]
    # Within one request the second part needs no medium either.
    assert (
        len(shown(read(named(image(pixels), "z"), again("image_url", "z"), source=source()))) == 2
    )


def test_nobody_reads_what_was_sent_under_another_salt() -> None:
    kept = source()
    read(named(image(png()), "a"), source=kept, cache_salt="mine")
    for options in ({}, {"cache_salt": "yours"}, {"cache_salt": "mine "}):
        error = refused(again("image_url", "a"), source=kept, **options)
        assert "no media item is stored for this uuid and cache_salt" in str(error)
        assert "send it again with its uuid" in str(error)
        assert error.field == "messages[0].content[0]"
    assert shown(read(again("image_url", "a"), source=kept, cache_salt="mine"))


def test_a_medium_that_is_sent_again_replaces_the_old_one() -> None:
    kept = source()
    read(named(image(png()), "a"), source=kept)
    assert shown(read(named(image(png(1)), "a"), source=kept)) == [("image", png(1))]
    assert shown(read(again("image_url", "a"), source=kept)) == [("image", png(1))]


def test_a_request_that_is_refused_names_nothing() -> None:
    kept = source()
    refused(named(image(png()), "a"), {"type": "image_url", "image_url": "x"}, source=kept)
    refused(again("image_url", "a"), source=kept)
    assert kept.known is not None and len(kept.known) == 0


def test_uuids_that_are_refused(monkeypatch) -> None:
    kept = source()
    read(named(image(png()), "a"), source=kept)
    assert "is of type image" in str(refused(again("video_url", "a"), source=kept))
    for kind, field in (("image_url", "url"), ("video_url", "url"), ("input_audio", "data")):
        error = refused({"type": kind, kind: {}}, source=kept)
        assert (str(error), error.field) == (
            f"messages[0].content[0].{kind}.{field}: is missing",
            f"messages[0].content[0].{kind}.{field}",
        )
    assert "needs file_data" in str(refused({"type": "file", "file": {}}, source=kept))
    assert "must not be empty" in str(refused(again("image_url", ""), source=kept))
    assert "more than the allowed 256 characters" in str(
        refused(again("image_url", "a" * 257), source=kept)
    )
    assert "must be text" in str(refused(named(image(png()), 5), source=kept))
    monkeypatch.setattr("oscar_mm.apps.serve.media_parts.MAX_BYTES", 2 * len(png()))
    error = refused(*[again("image_url", "a")] * 3, source=kept)
    assert "reused by uuid have more than" in str(error)
    assert error.field == "messages[0].content[2]"


def test_the_least_recently_used_media_go() -> None:
    known = KnownMedia(max_bytes=30)

    def add(uuid: str, size: int) -> None:
        known.add("", uuid, KnownMedium(Modality.IMAGE, NamedBytes(b"x" * size, uuid)))

    for uuid in "abc":
        add(uuid, 10)
    assert known.get("", "a") is not None
    add("d", 15)
    assert [uuid for uuid in "abcd" if known.get("", uuid)] == ["a", "d"]
    add("d", 31)  # More than all may have; and what it replaces is gone too.
    assert [uuid for uuid in "abcd" if known.get("", uuid)] == ["a"]
    add("e", 20)
    assert len(known) == 2


def test_a_server_answers_about_a_known_medium(client) -> None:
    def ask(*parts: dict[str, Any], salt: str) -> Any:
        asked: Any = {"model": "tiny", "messages": [user(*parts, text("What?"))], "max_tokens": 4}
        more = {"cache_salt": salt}
        return client.chat.completions.create(**asked, temperature=0, extra_body=more)

    first = ask(named(image(png()), "x"), named(sound(wav()), "y"), salt="s")
    then = ask(again("image_url", "x"), again("input_audio", "y"), salt="s")
    assert then.choices[0].message.content == first.choices[0].message.content
    assert then.usage.prompt_tokens == first.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="send it again with its uuid"):
        ask(again("image_url", "x"), salt="t")


# Hosts.


class Pages(BaseHTTPRequestHandler):
    """A picture, redirects to it, and answers that take long."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # pyright: ignore[reportAttributeAccessIssue]
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/a.png")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Type", "image/png")
        self.end_headers()
        if self.path == "/slow":
            for _ in range(100):
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.05)
        self.wfile.write(png())

    def handle(self) -> None:
        with suppress(ConnectionError):
            super().handle()

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture(scope="module")
def site() -> Iterator[Any]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    server.daemon_threads, server.asked = True, []  # pyright: ignore[reportAttributeAccessIssue]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")


def fetched(url: str, *hosts: str, limits: MediaLimits = LIMITS) -> ApiRequest:
    allowed = AllowedHosts(hosts) if hosts else None
    at = {"type": "image_url", "image_url": {"url": url}}
    return read(at, source=MediaSource(limits, 10**6, allowed))


def test_hosts(site, caplog) -> None:
    port = site.server_port
    here, local = f"http://127.0.0.1:{port}", f"http://localhost:{port}"
    assert shown(fetched(f"{here}/a.png", "example.org", "127.0.0.1")) == [("image", png())]
    assert shown(fetched(f"http://LOCALHOST:{port}/a.png", "LocalHost")) == [("image", png())]
    assert shown(fetched(f"{here}/moved")) == [("image", png())], "without hosts as ever"
    site.asked.clear()
    for url, hosts, logged in (
        (f"{here}/a.png", ["localhost"], "not be fetched from the host '127.0.0.1'"),
        (f"{local}/a.png", ["127.0.0.1"], "not be fetched from the host 'localhost'"),
        (f"{local}/a.png", ["*.localhost"], "not be fetched from the host 'localhost'"),
        (f"http://localhost.example.org:{port}/", ["localhost"], "not be fetched from"),
        (
            f"http://localhost@127.0.0.1:{port}/a.png",
            ["localhost"],
            "not be fetched from the host '127.0.0.1'",
        ),
        (
            f"http://127.0.0.1:{port}#@localhost/",
            ["localhost"],
            "not be fetched from the host '127.0.0.1'",
        ),
        (f"http://127.0.0.1:{port}\\@localhost/", ["localhost"], ""),
        (
            f"http://2130706433:{port}/a.png",
            ["127.0.0.1"],
            "not be fetched from the host '2130706433'",
        ),
        ("http:///a.png", ["localhost"], ""),
    ):
        caplog.clear()
        with pytest.raises(FieldError) as caught:
            fetched(url, *hosts)
        # A client learns neither what is allowed nor what is there.
        assert str(caught.value) == f"messages[0].content[0]: {NOT_FETCHED.format('image')}"
        assert logged in caplog.records[-1].getMessage(), url
    assert site.asked == []


def test_redirects_are_not_followed(site, caplog) -> None:
    site.asked.clear()
    with pytest.raises(FieldError):
        fetched(f"http://127.0.0.1:{site.server_port}/moved", "127.0.0.1")
    assert "returned 302" in caplog.records[-1].getMessage()
    assert site.asked == ["/moved"]


def test_time_and_sizes_are_bounded(site) -> None:
    here, begin = f"http://127.0.0.1:{site.server_port}", time.monotonic()
    with pytest.raises(FieldError):
        fetched(f"{here}/slow", "127.0.0.1", limits=MediaLimits(remote_timeout_s=0.2))
    assert time.monotonic() - begin < 4
    with pytest.raises(FieldError):
        fetched(f"{here}/a.png", "127.0.0.1", limits=MediaLimits(max_file_bytes=len(png()) - 1))


def test_hosts_below_a_name() -> None:
    hosts = AllowedHosts(["*.example.org", "m\u00fcnchen.example"])
    for host in ("a.example.org", "b.a.example.org", "xn--mnchen-3ya.example"):
        hosts.check(f"http://{host}/", "image")
    for host in (
        "example.org",
        "aexample.org",
        "example.org.evil.net",
        "org",
        "a.xn--mnchen-3ya.example",
    ):
        with pytest.raises(InputError, match="media may not be fetched from"):
            hosts.check(f"http://{host}/", "image")


@pytest.mark.parametrize(
    "name", ["", "http://a.org", "a.org/b", "a.org:8080", "*", "a.*.org", "u@a.org"]
)
def test_names_that_are_no_hosts(name: str) -> None:
    with pytest.raises(InputError, match="is not a host name; use one such as"):
        AllowedHosts([name])


def test_the_option() -> None:
    assert media_domains(None, allow_remote=False) == []
    assert media_domains(["a.org, b.org", "c.org"], allow_remote=True) == [
        "a.org",
        "b.org",
        "c.org",
    ]
    with pytest.raises(InputError, match="--allowed-media-domains has no effect without"):
        media_domains(["a.org"], allow_remote=False)
    with pytest.raises(InputError, match=r"--allowed-media-domains: 'a\.org/b' is not a host name"):
        media_domains(["a.org/b"], allow_remote=True)


def test_the_option_with_vllm() -> None:
    given = {"allow_remote": True, "allowed_media_domains": ["a.org", "b.org"]}
    found = vllm_arguments("pocket-vl", "standard", "127.0.0.1", 8000, given)
    at = found.index("--allowed-media-domains")
    assert found[at + 1 : at + 3] == ["a.org", "b.org"]
    assert vllm_command(found, None)[1]["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"
    given["allowed_media_domains"] = ["*.a.org"]
    with pytest.raises(InputError, match="vLLM matches only complete host names; list each host"):
        vllm_arguments("pocket-vl", "standard", "127.0.0.1", 8000, given)
