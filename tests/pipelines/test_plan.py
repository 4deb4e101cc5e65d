"""Plans say what the pipelines then do, and read no weights."""

import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch

from benchmarks.random_model import FAMILIES, RELEASED
from oscar_mm import InputError, KVPolicy, OscarVLPipeline
from oscar_mm.admission.request_size import count_tokens
from oscar_mm.media import MediaLimits, load_video
from oscar_mm.media.media import Media
from oscar_mm.media.resample import RATE
from oscar_mm.modality import Modality
from oscar_mm.pages.layout import PageFormat
from oscar_mm.pipelines.families.qwen3_omni import audio_tokens
from oscar_mm.pipelines.loading import outline
from oscar_mm.pipelines.pipeline import Pipeline
from oscar_mm.pipelines.plan import Plan, Session, plan
from oscar_mm.policy import PLAIN, Bits
from tests.prompts import clip, noise, prepare, tone
from tests.quantized_checkpoints import AWQ, awq, quantize_folder

COUNTER = Path(__file__).parents[2] / "examples" / "media" / "counter.mp4"


def tokens_of(pipe: Pipeline, media: Media) -> dict[str, int]:
    """By modality, of the prompt that the pipeline makes."""
    ids = prepare(pipe, "?", media).modalities
    return {one.label: int((ids == one).sum()) for one in Modality}


def without_pixels(media: Media) -> Media:
    videos = [
        replace(video, frames=torch.empty(video.frames.shape, dtype=torch.uint8, device="meta"))
        for video in media.videos
    ]
    return Media(images=media.images, videos=videos, audio=media.audio)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("llava", {"images": [noise(100, 200), noise(56, 56, 1), noise(300, 90, 2)]}),
        ("vicuna", {"images": [noise(100, 200)]}),
        ("vicuna", {}),
        ("qwen", {"images": [noise(96, 70)], "videos": [clip(6), COUNTER]}),
        ("omni", {"audio": [tone(2.345), tone(0.7)], "images": [noise(96, 70)] * 2}),
        ("omni", {"videos": [COUNTER], "audio": [tone(9.0)]}),
    ],
)
def test_counts_are_those_of_the_prompt(
    name: str, shown: dict, request: pytest.FixtureRequest
) -> None:
    pipe = request.getfixturevalue(name)
    media = pipe.read_media(**shown)
    assert count_tokens(pipe.family, without_pixels(media)) == tokens_of(pipe, media)


def test_recordings_of_any_length(omni: Pipeline) -> None:
    lengths = np.random.default_rng(0).integers(1600, 20 * RATE, 12).tolist()
    for samples in [1600, RATE - 1, RATE, RATE + 1, RATE + 80, *lengths]:
        media = omni.read_media(audio=[(np.full(samples, 0.1, np.float32), RATE)])
        assert tokens_of(omni, media)["audio"] == audio_tokens(samples), samples


@pytest.mark.parametrize("fps", [2.0, 0.4, 7.3])
def test_a_video_file_is_sampled_as_planned(fps: float) -> None:
    video = load_video(COUNTER, fps=fps)
    height, width = video.frames.shape[1:3]
    session = Session(video_s=video.seconds, video_size=(width, height))
    [planned] = session.media(MediaLimits(), fps).videos
    assert planned.frames.shape == video.frames.shape
    assert planned.frames.device.type == "meta"


def test_bytes_are_those_that_the_pipeline_holds(qwen3_vl_folder: Path) -> None:
    pipe = OscarVLPipeline(qwen3_vl_folder, device="cpu", dtype="bfloat16")
    answer = pipe([noise(256, 256, seed) for seed in range(4)], "?", max_new_tokens=40)
    made = plan(qwen3_vl_folder, Session(images=4, image_size=(256, 256), text_tokens=39))
    # The last token of the answer is not stored, and an answer may end early.
    early = 40 - len(answer.token_ids) - (answer.finish_reason == "stop")
    tokens = made.tokens | {"text": made.tokens["text"] - early}
    assert tokens == answer.memory.tokens
    kinds = answer.memory.by_kind
    held = answer.memory.kv_bytes - kinds["tables"] - kinds["unused"]
    # Beyond it what the answer's next tokens would take first: up to 32 slots.
    token = made.shape.layers * made.shape.slot_bytes(made.policy)[PLAIN]
    spare, rest = divmod(held - made.shape.kv_bytes(made.policy, tokens), token)
    assert 0 <= spare <= 32 and rest == 0
    assert made.shape.parameters == pipe.model.num_parameters()


@pytest.mark.daily(
    "Qwen/Qwen3-VL-8B-Instruct-8.77-288",
    "qwen3-omni-30b-a3b-31.7-192",
    "llava-v1.6-mistral-7b-7.57-256",
    "qwen3-vl-30b-a3b-31.1-192",
)
@pytest.mark.parametrize(
    ("name", "billions", "heads_of_all_layers"),
    [
        ("qwen3-vl-2b", 2.13, 28 * 8),
        ("qwen3-vl-4b", 4.44, 36 * 8),
        ("Qwen/Qwen3-VL-8B-Instruct", 8.77, 36 * 8),
        ("qwen3-vl-32b", 33.4, 64 * 8),
        ("qwen3-vl-30b-a3b", 31.1, 48 * 4),
        ("qwen3-omni-30b-a3b", 31.7, 48 * 4),
        ("llava-v1.6-vicuna-7b", 7.06, 32 * 32),
        ("llava-v1.6-mistral-7b", 7.57, 32 * 8),
        ("llava-v1.6-vicuna-13b", 13.35, 40 * 40),
        ("llava-hf/llava-v1.6-34b-hf", 34.75, 60 * 8),
    ],
)
def test_released_models_by_name(name: str, billions: float, heads_of_all_layers: int) -> None:
    made = plan(name, Session(images=2, image_size=(1280, 960), text_tokens=100), "bf16")
    assert made.shape.parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    assert made.kv_bytes / made.total == 2 * 2 * 128 * heads_of_all_layers
    assert made.tokens["image"] == 2 * (2340 if "llava" in name else 1200)
    assert 100 < made.tokens["text"] < 120


@pytest.mark.parametrize("name", ["qwen3-vl-8b", "qwen3-omni-30b-a3b"])
def test_released_models_read_videos(name: str) -> None:
    """Qwen3-VL bounds the pixels of a video, and writes a time of some 8 tokens before a frame."""
    made = plan(name, Session(video_s=60, video_size=(640, 480), text_tokens=0))
    frames, of_frame = 60, 20 * 15
    if name == "qwen3-vl-8b":
        assert 0.9 * 12288 < made.tokens["video"] <= 12288
        assert 8 * frames < made.tokens["text"] < 10 * frames
    else:
        assert made.tokens["video"] == frames * of_frame and made.tokens["text"] < 20


@pytest.fixture(scope="module")
def omni_without_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configuration and processor of Qwen3-Omni-30B-A3B, and nothing else."""
    released = RELEASED["qwen3-omni-30b-a3b"]
    _, config, processor = FAMILIES[released.family](released)
    folder = tmp_path_factory.mktemp("omni")
    config.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def test_a_model_of_thirty_billion_parameters(omni_without_weights: Path) -> None:
    made = plan(omni_without_weights, Session(images=40, audio_s=5400, text_tokens=1000))
    assert made.tokens["image"] == 40 * 1200 and made.tokens["audio"] == 5400 * 13
    assert 1000 + 2 * 41 < made.tokens["text"] < 1200
    assert made.shape.parameters / 1e9 == pytest.approx(31.7, rel=2e-3)
    assert made.context == 65536 < made.total
    assert not made.to_dict()["fits_context"]
    per_token = 48 * 2 * 4 * 128 * 2
    assert made.bf16_bytes == pytest.approx(per_token * made.total, rel=1e-3)
    of_pages = 16 / PageFormat.of(made.policy, Bits(3, 2), 4, 128).bits_per_value
    assert 0.94 * of_pages < made.bf16_bytes / made.kv_bytes < of_pages
    assert made.fits(48e9) == (0, 0), "the weights alone take 63 GB"
    in_16_bit, packed = made.fits(141e9)
    assert in_16_bit == 5 and 0.85 * of_pages < packed / in_16_bit < 1.1 * of_pages


def test_outline_reads_no_weights(omni_without_weights: Path) -> None:
    assert not list(omni_without_weights.glob("*.safetensors"))
    family = outline(omni_without_weights)
    assert {weight.device.type for weight in family.outer_model.parameters()} == {"meta"}


def test_bundled_names() -> None:
    made = plan("pocket-llava", Session(images=3), KVPolicy.preset("oscar"))
    assert isinstance(made, Plan) and made.family == "LLaVA-NeXT"
    assert made.tokens["image"] > 0 == made.tokens["audio"]


@pytest.mark.parametrize(
    ("session", "said"),
    [
        ({"images": -1}, "images=-1: must be a whole number from 0 to 100,000"),
        ({"images": 2.5}, "images=2.5: must be a whole number"),
        ({"audio_s": float("nan")}, "audio_s=nan"),
        ({"audio_s": 5 * 3600}, "audio_s: lasts 18000.0 s, longer than the limit"),
        ({"video_s": 4000}, "video_s: lasts 4000.0 s, longer"),
        ({"images": 1, "image_size": (40_000, 30_000)}, "image_size: 40000x30000 pixels"),
        ({"images": 1, "image_size": (0, 30)}, "image_size: is empty"),
        ({"audio_s": 3}, "Qwen3-VL does not support audio"),
    ],
)
def test_bad_sessions(session: dict, said: str, qwen3_vl_folder: Path) -> None:
    with pytest.raises(InputError, match=said):
        plan(qwen3_vl_folder, Session(**session))


@pytest.mark.parametrize("policy", KVPolicy.preset_names())
def test_modalities_sum_to_all(qwen3_vl_folder: Path, policy: str) -> None:
    made = plan(qwen3_vl_folder, Session(images=9, text_tokens=150), policy=policy)
    sizes = made.by_modality()
    assert list(sizes) == [name for name, count in made.tokens.items() if count]
    assert tuple(map(sum, zip(*sizes.values(), strict=True))) == (made.bf16_bytes, made.kv_bytes)
    in_16_bit, packed = sizes["image"]
    # Window and sinks are of text.
    assert in_16_bit == packed if policy == "bf16" else in_16_bit > packed


def test_quantized_weights_count_as_they_are_stored(qwen3_vl_folder, tmp_path) -> None:
    quantize_folder(qwen3_vl_folder, tmp_path / "awq", AWQ, awq, shards=2)
    plain, found = (plan(one, Session()) for one in (qwen3_vl_folder, tmp_path / "awq"))
    assert (plain.weights, found.weights) == ("16-bit", "INT4 (AWQ)")
    files = (tmp_path / "awq").glob("*.safetensors")
    assert found.shape.weight_bytes == sum(file.stat().st_size for file in files)
    assert plain.shape.weight_bytes == 2 * plain.shape.parameters == 2 * found.shape.parameters
    quantize_folder(qwen3_vl_folder, tmp_path / "eight", AWQ | {"bits": 8}, awq)
    with pytest.raises(InputError, match=r"model .*eight: quantization_config.bits is 8"):
        plan(tmp_path / "eight", Session())


@pytest.mark.parametrize("folder", ["qwen3_vl_folder", "qwen3_vl_moe_folder", "llava_next_folder"])
@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_weights_quantized_at_load_count_as_loaded(folder, weights, request) -> None:
    source = request.getfixturevalue(folder)
    made = plan(source, Session(), weights=weights)
    pipe = OscarVLPipeline(source, device="cpu", dtype="bfloat16", weights=weights)
    assert made.weights == weights.upper()
    assert made.shape.weight_bytes == sum(one.nbytes for one in pipe.model.parameters())
    assert made.shape.parameters == plan(source, Session()).shape.parameters


@pytest.mark.parametrize(("weights", "gigabytes"), [(None, 62.1), ("fp8", 32.3), ("int4", 18.0)])
def test_weights_of_a_released_mixture_of_experts(weights, gigabytes) -> None:
    """29.9 of its 31.1 billion parameters are matrices of the decoder's layers."""
    made = plan("qwen3-vl-30b-a3b", Session(), weights=weights)
    assert made.shape.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_weights_that_cannot_be_quantized_at_load(qwen3_vl_folder, tmp_path) -> None:
    with pytest.raises(InputError, match="weights='int3': must be one of fp8, int4"):
        plan(qwen3_vl_folder, Session(), weights="int3")
    quantize_folder(qwen3_vl_folder, tmp_path / "awq", AWQ, awq, shards=2)
    with pytest.raises(InputError, match="weights='fp8': the checkpoint is already quantized"):
        plan(tmp_path / "awq", Session(), weights="fp8")


def in_the_cache(folder: Path, cache: Path, *, weights: bool) -> str:
    """Put a folder into a cache of the hub; return its hub id."""
    snapshot = cache / "models--owner--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cache / "models--owner--model" / "refs").mkdir()
    (cache / "models--owner--model" / "refs" / "main").write_text("abc")
    for file in folder.iterdir():
        if weights or file.suffix != ".safetensors":
            shutil.copy(file, snapshot)
    return "owner/model"


@pytest.mark.parametrize("weights", [True, False])
def test_quantized_weights_of_a_hub_id(weights, qwen3_vl_folder, tmp_path, monkeypatch) -> None:
    quantize_folder(qwen3_vl_folder, tmp_path / "awq", AWQ, awq, shards=2)
    source = in_the_cache(tmp_path / "awq", tmp_path / "hub", weights=weights)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = plan(tmp_path / "awq", Session())
    if weights:
        assert plan(source, Session()) == folder
        return
    start = time.monotonic()
    with pytest.raises(InputError, match=r"model owner/model: its weights are not on this machine"):
        plan(source, Session())
    assert time.monotonic() - start < 5
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "awq").iterdir()}
    files = [SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
    answer = SimpleNamespace(siblings=files)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: answer)
    assert plan(source, Session()) == folder


def test_a_hub_id_that_is_not_here_is_refused_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(InputError, match="model owner/no-such: not on this machine"):
        plan("owner/no-such", Session())
    assert time.monotonic() - start < 5
