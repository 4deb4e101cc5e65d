"""Options of media, against qwen-vl-utils and plain transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from qwen_vl_utils import vision_process
from transformers import AutoProcessor
from transformers.image_utils import SizeDict

from oscar_mm import InputError, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.engine.message import media_of
from oscar_mm.engine.message_lists import messages_from
from oscar_mm.media import MediaLimits
from oscar_mm.media.media import MediaReader
from oscar_mm.media.options import OF_MODALITY, MediaOptions
from oscar_mm.modality import Modality
from oscar_mm.pipelines.pipeline import Pipeline
from tests.prompts import clip, noise, tone
from tests.recordings import write_movie

FACTOR = 32
USUAL_SIZE = SizeDict(shortest_edge=65_536, longest_edge=16_777_216)
"""The bounds of the checkpoints; those of tiny ones are lower."""


@pytest.fixture(scope="module")
def processor(qwen3_vl_folder) -> Any:
    return AutoProcessor.from_pretrained(qwen3_vl_folder)


@pytest.fixture(scope="module")
def movies(tmp_path_factory) -> dict[str, Path]:
    """Clips of different lengths and rates, frame k in grey level 7k or so."""
    folder = tmp_path_factory.mktemp("movies")

    def grey(count: int, height: int = 96, width: int = 160) -> np.ndarray:
        levels = (np.arange(count) * (250 // count)).astype(np.uint8)
        return np.broadcast_to(levels[:, None, None, None], (count, height, width, 3)).copy()

    return {
        "8 fps": write_movie(folder / "a.mp4", grey(32), None),
        "25 fps": write_movie(folder / "b.mkv", grey(49), None, rate=25),
        "30 fps": write_movie(folder / "c.mov", grey(23, 64, 48), None, rate=30),
        "3 frames": write_movie(folder / "d.mp4", grey(3), None, rate=2),
    }


def read_by_pyav(ele: dict[str, Any]) -> Any:
    """A reader of qwen-vl-utils: its own choice of frames, decoded in full by PyAV."""
    with av.open(ele["video"]) as container:
        rate = float(container.streams.video[0].average_rate or 0)
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    start, end, total = vision_process.calculate_video_frame_range(ele, len(frames), rate)
    count = vision_process.smart_nframes(ele, total_frames=total, video_fps=rate)
    places = torch.linspace(start, end, count).round().long().tolist()
    video = torch.tensor(np.stack([frames[place] for place in places])).permute(0, 3, 1, 2)
    metadata = {
        "fps": rate,
        "frames_indices": places,
        "total_num_frames": total,
        "video_backend": "pyav",
    }
    return video, metadata, count / total * rate


@pytest.fixture(autouse=True)
def reader(monkeypatch) -> None:
    monkeypatch.setattr(vision_process, "get_video_reader_backend", lambda: "torchvision")
    monkeypatch.setitem(vision_process.VIDEO_READER_BACKENDS, "torchvision", read_by_pyav)


def conversation(part: dict[str, Any]) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": "Look:"}, part, {"type": "text", "text": "What?"}]
    return [{"role": "user", "content": content}]


def by_utils(processor: Any, messages: list[dict[str, Any]]) -> Any:
    """What the processor makes of what qwen-vl-utils reads, as the model's card has it."""
    images, videos, how = vision_process.process_vision_info(
        messages, image_patch_size=16, return_video_kwargs=True, return_video_metadata=True
    )
    clips, metadata = zip(*videos, strict=True) if videos else (None, None)
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    found = {"videos": [*clips], "video_metadata": [*metadata]} if videos else {}
    return processor(
        text=text, images=images, **found, do_resize=False, return_tensors="pt", **(how or {})
    )


IMAGES = [
    {"min_pixels": 4 * FACTOR**2, "max_pixels": 40 * FACTOR**2},
    {"min_pixels": 300 * FACTOR**2, "max_pixels": 400 * FACTOR**2},
    {"min_pixels": 1, "max_pixels": 50_000},
    {"resized_height": 200, "resized_width": 333},
    {"resized_height": 5, "resized_width": 900},
]
SIZES = [(97, 160), (300, 41), (700, 500), (16, 16)]


@pytest.mark.parametrize("options", IMAGES)
def test_images_have_the_sizes_of_qwen_vl_utils(qwen, processor, options) -> None:
    for size in SIZES:
        part = {"type": "image", "image": Image.fromarray(noise(*size)), **options}
        expected = by_utils(processor, conversation(part))
        prompt = qwen.read_request(messages_from(conversation(part)))
        assert torch.equal(prompt.inputs["image_grid_thw"], expected["image_grid_thw"])
        # The sizes that are told before anything is decoded.
        outline = qwen.media_reader.outline(media_of(messages_from(conversation(part))))
        [medium] = list(outline)
        assert qwen.family.min_tokens(medium) == int(expected["image_grid_thw"].prod()) // 4


@pytest.mark.parametrize("options", [{"max_pixels": 40_000}, {"min_pixels": 200_000}])
def test_a_bound_that_is_not_given_is_the_checkpoints(qwen, processor, options) -> None:
    own = dict(processor.image_processor.size)
    [given] = options.values()
    end, more = ("longest_edge", min) if "max_pixels" in options else ("shortest_edge", max)
    bounds = {name: more(own[name], given) for name in ("shortest_edge", "longest_edge")}
    bounds[end] = given
    for size in SIZES:
        picture = Image.fromarray(noise(*size))
        expected = processor.image_processor([picture], size=bounds, return_tensors="pt")
        prompt = qwen.read_request(
            messages_from(conversation({"type": "image", "image": picture, **options}))
        )
        assert torch.equal(prompt.inputs["image_grid_thw"], expected["image_grid_thw"])


@pytest.mark.parametrize("side", [64, 8000])
@pytest.mark.parametrize("name", ["min_pixels", "max_pixels"])
def test_no_option_asks_for_more_tokens_than_a_given_size_may(qwen, name, side) -> None:
    """Else a small request would hold a tower, and others that wait for it, for minutes."""
    options, most = MediaOptions(**{name: 50_000_000}), 16_384 * FACTOR**2
    for width, height in (
        qwen.family.image_size(side, side, options),
        qwen.family.frame_size(side, side, 2, options),
    ):
        assert width * height <= most


CLIPS = [
    {"fps": 2},
    {"fps": 1.0, "min_frames": 2},
    {"fps": 30, "max_frames": 7},
    {"nframes": 6},
    {"video_start": 0.4, "video_end": 0.8},
    {"video_start": 0.3, "nframes": 2},
    {"video_end": 0.7, "fps": 8},
    {"fps": 4, "min_pixels": 1, "max_pixels": 9 * FACTOR**2},
    {"nframes": 4, "total_pixels": 300_000, "min_pixels": FACTOR**2},
    {"resized_height": 100, "resized_width": 70, "nframes": 2},
    {"max_pixels": 200_000, "min_pixels": 180_000, "nframes": 2},
    {"max_pixels": 2000, "min_pixels": 1000, "nframes": 2},
]


@pytest.mark.parametrize("options", CLIPS)
def test_videos_have_the_frames_sizes_and_times_of_qwen_vl_utils(
    qwen, processor, movies, options
) -> None:
    sized = MediaOptions(**{k: v for k, v in options.items() if k != "nframes"}).scales_frames
    for name, path in movies.items():
        if name == "3 frames" and ("nframes" in options or "video_start" in options):
            continue  # qwen-vl-utils refuses more frames than there are.
        if name == "3 frames" and "video_end" in options:
            continue
        part = {"type": "video", "video": str(path), **options}
        expected = by_utils(processor, conversation(part))
        messages = messages_from(conversation(part))
        with qwen.media_reader.reading(media_of(messages)) as media:
            [video] = media.videos
            theirs, metadata, _ = read_by_pyav(part)
            times = [place / metadata["fps"] for place in metadata["frames_indices"]]
            assert video.times == pytest.approx(times, abs=1e-9), name
            levels = video.frames.mean((1, 2, 3))
            assert levels == pytest.approx(theirs.float().mean((1, 2, 3)).numpy(), abs=2), name
            if not sized:
                continue
            prompt = qwen.prepare(messages, media)
        assert torch.equal(prompt.inputs["video_grid_thw"], expected["video_grid_thw"]), name
        if "text" not in name:
            assert prompt.inputs["input_ids"].tolist() == by_marks(expected["input_ids"], processor)


def by_marks(ids: torch.Tensor, processor: Any) -> list[list[int]]:
    """Ids without the pair of marks that transformers 5 writes around a whole video."""
    start, end = processor.vision_start_token_id, processor.vision_end_token_id
    row = ids[0].tolist()
    first = row.index(start)
    last = len(row) - 1 - row[::-1].index(end)
    return [row[:first] + row[first + 1 : last] + row[last + 1 :]]


@pytest.fixture(scope="module")
def omni_movie(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("omni") / "a.mp4"
    return write_movie(path, clip(24, 3), tone(3))


def test_omni_gets_the_sound_of_the_part_that_it_is_shown(omni, omni_movie) -> None:
    part = {"type": "video", "video": str(omni_movie), "video_start": 1, "video_end": 2.0}
    [given] = media_of(messages_from(conversation(part), sound=True))
    [video] = omni.media_reader.read([given]).videos
    whole = {"type": "video", "video": str(omni_movie)}
    [full] = omni.media_reader.read(media_of(messages_from(conversation(whole), sound=True))).videos
    assert video.times[0] == 1 and video.times[-1] <= 2 and video.sound.seconds == 1.125
    assert np.array_equal(video.sound.samples, full.sound.samples[16_000:34_000])
    [outline] = list(omni.media_reader.outline([given]))
    assert outline.content.sound.seconds == pytest.approx(1.125)
    assert omni.chat_completion(
        conversation(part), max_new_tokens=2, temperature=0
    ).token_ids  # The family's positions follow.


@pytest.mark.parametrize("kind", ["qwen", "omni"])
def test_a_medium_keeps_its_tokens_next_to_others(kind: str, request, movies) -> None:
    """Sized and unsized media of one request are what each is by itself."""
    pipe: Pipeline = request.getfixturevalue(kind)
    picture, path = Image.fromarray(noise(200, 300)), str(movies["8 fps"])
    parts = [
        {"type": "image", "image": picture, "max_pixels": 20_000, "min_pixels": 5000},
        {"type": "video", "video": path, "nframes": 4},
        {"type": "image", "image": picture},
        {"type": "video", "video": path, "max_pixels": 20_000, "min_pixels": 5000},
        {"type": "image", "image": picture, "resized_width": 64, "resized_height": 96},
        {"type": "video", "video": path},
    ]
    alone = [pipe.read_request(messages_from(conversation(part))) for part in parts]
    together = pipe.read_request(messages_from([{"role": "user", "content": [*parts, "?"]}]))
    for name in ("image_grid_thw", "video_grid_thw", "pixel_values", "pixel_values_videos"):
        expected = [one.inputs[name] for one in alone if name in one.inputs]
        assert torch.equal(together.inputs[name], torch.cat(expected)), name
    tokens = [span.tokens for span in together.media]
    assert tokens == [one.media[0].tokens for one in alone]
    assert len({one.media[0].digest for one in alone}) == len(alone)


def test_pixels_of_one_size_read_in_two_ways_share_no_digest(qwen, monkeypatch) -> None:
    """Else pages of one would be taken for those of the other."""
    monkeypatch.setattr(qwen.processor.image_processor, "size", USUAL_SIZE)
    picture = Image.fromarray(noise(64, 64))
    sized = {"type": "image", "image": picture, "resized_width": 64, "resized_height": 64}
    both = [sized, {"type": "image", "image": picture}]
    found = [qwen.read_request(messages_from(conversation(part))).media[0] for part in both]
    assert found[0].digest != found[1].digest and found[0].tokens == 4 < found[1].tokens


def test_options_of_a_request_hold_for_all_media_without_their_own(qwen, movies) -> None:
    picture, path = Image.fromarray(noise(200, 300)), str(movies["8 fps"])
    low = {"min_pixels": 5000, "max_pixels": 20_000}
    own = {"type": "image", "image": picture, "max_pixels": 50_000}
    messages = [{"role": "user", "content": [{"type": "image", "image": picture}, own, "?"]}]
    both = [
        part | low | {"max_pixels": part.get("max_pixels", 20_000)}
        for part in messages[0]["content"][:2]
    ]
    expected = qwen.chat_completion(
        [{"role": "user", "content": [*both, "?"]}], max_new_tokens=4, temperature=0
    )
    how = {"max_new_tokens": 4, "temperature": 0, **low}
    for answer in (
        qwen.chat_completion(messages, **how),
        qwen(messages=messages, **how),
        qwen.batch([{"messages": messages, **how}])[0].answer,
        qwen.chat().ask(messages=messages, **how),
    ):
        assert answer.prompt_tokens == expected.prompt_tokens
        assert answer.token_ids == expected.token_ids
    few = qwen([], "?", videos=[path], num_frames=4, max_new_tokens=1)
    more = qwen([], "?", videos=[path], num_frames=8, max_new_tokens=1)
    assert few.prompt_tokens < more.prompt_tokens
    # A part's own frames replace the rate of the request.
    part = {"type": "video", "video": path, "nframes": 4}
    assert (
        qwen.chat_completion(conversation(part), fps=8, max_new_tokens=1).prompt_tokens
        == qwen.chat_completion(conversation(part), max_new_tokens=1).prompt_tokens
    )


def test_detail(qwen, llava, monkeypatch) -> None:
    picture = Image.fromarray(noise(900, 900))

    def tokens(pipe: Pipeline, **detail: Any) -> int:
        part = {"type": "image", "image": picture, **detail}
        return pipe.read_request(messages_from(conversation(part))).media[0].tokens

    monkeypatch.setattr(qwen.processor.image_processor, "size", USUAL_SIZE)
    assert tokens(qwen, detail="low") == (512 // FACTOR) ** 2
    assert tokens(qwen) == tokens(qwen, detail="high") == tokens(qwen, detail="auto") == 28**2
    assert tokens(llava, detail="low") == tokens(llava)
    url = {"url": "data:image/png;base64,AAAA", "detail": "low"}
    [part] = media_of(messages_from(conversation({"type": "image_url", "image_url": url})))
    assert part.options == MediaOptions(detail="low")


def test_frames_in_a_list(qwen) -> None:
    frames = [Image.fromarray(one) for one in clip(4)]
    part = {"type": "video", "video": frames, "fps": 1, "resized_width": 64, "resized_height": 96}
    messages = messages_from(conversation(part))
    [video] = qwen.media_reader.read(media_of(messages)).videos
    assert video.times == [0, 1, 2, 3] and video.frames.shape == (4, 96, 64, 3)
    [outline] = list(qwen.media_reader.outline(media_of(messages)))
    assert outline.content.frames.shape == video.frames.shape
    with pytest.raises(InputError, match=r"content\[1\]: num_frames applies only to video files"):
        qwen.chat_completion(conversation({"type": "video", "video": frames, "nframes": 2}))


def test_a_bare_array_of_samples(omni) -> None:
    samples, rate = tone(1.5)
    options: dict[str, Any] = {"max_new_tokens": 3, "temperature": 0}
    expected = omni(prompt="What?", audio=(samples, rate), **options).token_ids
    for given in (samples, torch.from_numpy(samples)):
        part = {"type": "audio", "audio": given, "sampling_rate": rate}
        messages = [{"role": "user", "content": [part, "What?"]}]
        assert omni.chat_completion(messages, **options).token_ids == expected
    assert (
        omni(prompt="What?", audio=[samples], sampling_rate=rate, **options).token_ids == expected
    )
    with pytest.raises(InputError, match="an array of samples needs a rate"):
        omni(prompt="What?", audio=[samples])


LIMITS = MediaLimits(max_image_pixels=100_000, max_video_frames=8, max_video_pixels=400_000)
REFUSED = [
    (
        "image",
        {"max_pixels": 100_001},
        "max_pixels=100,001 is more than the limit of 100,000; lower it",
    ),
    ("image", {"min_pixels": 100_001}, "min_pixels=100,001 is more than the limit"),
    ("image", {"resized_width": 1000, "resized_height": 1000}, "resized_width x resized_height="),
    ("video", {"nframes": 9}, "num_frames=9 is more than the limit of 8; lower it or raise"),
    ("video", {"max_frames": 9}, "max_frames=9 is more than"),
    ("video", {"total_pixels": 400_001}, "total_pixels=400,001 is more than"),
    ("video", {"resized_width": 320, "resized_height": 300}, "8 frames of 320x288 have more"),
    ("video", {"video_start": 3.9}, "this video of 4.0 s has fewer than two frames"),
    ("video", {"video_start": 100}, "this video of 4.0 s has fewer than two frames"),
    (
        "video",
        {"video_start": 2, "video_end": 1},
        "video_start=2 must not be more than video_end=1",
    ),
    ("video", {"fps": 1, "nframes": 4}, "fps and num_frames: set only one"),
    ("video", {"fps": 0}, "fps=0: must be a number of frames per second above 0"),
    ("video", {"fps": float("nan")}, "fps=nan: must be a number"),
    ("video", {"nframes": 1}, "num_frames=1: must be at least 2"),
    (
        "image",
        {"min_pixels": 9, "max_pixels": 8},
        "min_pixels=9 must not be more than max_pixels=8",
    ),
    ("image", {"min_pixels": True}, "min_pixels=True: must be a whole number"),
    ("image", {"max_pixels": 1.5}, "max_pixels=1.5: must be a whole number"),
    ("image", {"resized_width": 64}, "set both or neither"),
    (
        "image",
        {"resized_width": 1, "resized_height": 999},
        "1x999 have a ratio of more than 200:1; choose",
    ),
    ("image", {"detail": "tiny"}, "detail='tiny': must be one of auto, low, high"),
    ("image", {"fps": 2}, r"unsupported fields \(fps\); leave them out"),
    ("video", {"detail": "low"}, r"unsupported fields \(detail\); leave them out"),
]


@pytest.mark.parametrize(("kind", "options", "expected"), REFUSED)
def test_refused(qwen, movies, kind: str, options, expected: str) -> None:
    source = Image.fromarray(noise(40, 40)) if kind == "image" else str(movies["8 fps"])
    reader = MediaReader(LIMITS, sizes=qwen.family)
    with pytest.raises(InputError, match=expected) as caught:
        reader.read(media_of(messages_from(conversation({"type": kind, kind: source, **options}))))
    assert str(caught.value).startswith(("messages[0].content[1]", str(source)))


@pytest.mark.parametrize("options", [{"fps": 2}, {"max_pixels": 9000}, {"sampling_rate": 8000}])
def test_a_family_without_the_option(llava, options) -> None:
    [name] = options
    picture = noise(40, 40)
    with pytest.raises(
        InputError, match=f"{name}: LLaVA-NeXT does not support this option; it supports"
    ):
        llava([picture], "What?", **options)
    with pytest.raises(InputError, match=f"{name}: LLaVA-NeXT does not support this option"):
        llava.chat().ask("What?", images=[picture], **options)
    [result] = llava.batch([{"images": [picture], "prompt": "What?", **options}])
    assert "LLaVA-NeXT does not support this option" in str(result.error)
    if name == "max_pixels":
        part = {"type": "image", "image": picture, **options}
        with pytest.raises(
            InputError, match=r"content\[1\]: this model does not support max_pixels"
        ):
            llava.chat_completion(conversation(part))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(200))
def test_random_sizes(qwen, processor, seed: int) -> None:
    rng = random.Random(seed)
    least = rng.randint(1, 400) * FACTOR**2
    options = {"min_pixels": least, "max_pixels": least + rng.randint(FACTOR**2, 10**6)}
    part = {
        "type": "image",
        "image": Image.fromarray(noise(rng.randint(1, 900), rng.randint(5, 900))),
        **options,
    }
    expected = by_utils(processor, conversation(part))["image_grid_thw"]
    prompt = qwen.read_request(messages_from(conversation(part)))
    assert torch.equal(prompt.inputs["image_grid_thw"], expected)


def test_all_options_belong_to_a_modality() -> None:
    assert {name for names in OF_MODALITY.values() for name in names} == set(vars(MediaOptions()))
    assert {OscarVLPipeline, OscarOmniPipeline} and set(OF_MODALITY) == {
        Modality.IMAGE,
        Modality.VIDEO,
        Modality.AUDIO,
    }
