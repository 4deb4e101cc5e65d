"""A model family in one file: LLaVA-1.5, which oscar_mm does not know."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPImageProcessor,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from oscar_mm import InputError, OscarVLPipeline
from oscar_mm.engine.family import Encoding, Family
from oscar_mm.engine.input_layout import InputLayout
from oscar_mm.fast_decode import decoder
from oscar_mm.media.media import Medium
from oscar_mm.modality import Modality
from oscar_mm.models import released
from oscar_mm.models.released import LLAVA_NEXT, ReleasedModel
from oscar_mm.pipelines import pipeline_for, register_family, registry
from oscar_mm.pipelines.plan import Session, plan
from tests.prompts import noise
from tests.tiny import CLIP_VISION, llama_tokenizer, randomize

TEMPLATE = """
{%- for message in messages -%}
{{ message.role.upper() ~ ': ' }}
{%- for part in message.content -%}
{{ '<image>\\n' if part.type == 'image' else part.text }}
{%- endfor -%}{{ ' ' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}
""".strip()


class Llava(Family):
    """LLaVA-1.5: each image is scaled to one size."""

    model_types = ("llava",)
    name = "LLaVA-1.5"
    reads = frozenset({Modality.IMAGE})
    layout = InputLayout(per_medium={"pixel_values": Modality.IMAGE})
    released = (
        ReleasedModel(
            "llava-hf/llava-1.5-7b-hf", "llava", LLAVA_NEXT[0].text, LLAVA_NEXT[0].vision
        ),
    )
    pocket = "pocket-llava"
    plain_template = TEMPLATE

    def encode(self, text: str, media: Sequence[Medium]) -> Encoding:
        images = {"images": [medium.content for medium in media]} if media else {}
        inputs = self.processor(
            text=[text], **images, **self.text_options(text), return_tensors="pt"
        )
        ids = inputs["input_ids"]
        return Encoding(
            input_ids=ids,
            tensors={"pixel_values": inputs["pixel_values"]} if media else {},
            positions=torch.arange(ids.shape[1])[None],
            media_tokens=[self.min_tokens(medium) for medium in media],
        )

    def min_tokens(self, medium: Medium) -> int:
        crop = self.processor.image_processor.crop_size
        return (crop["height"] // self.processor.patch_size) ** 2

    @classmethod
    def as_released(cls, processor: Any, fields: dict[str, Any], model: ReleasedModel) -> Any:
        processor = super().as_released(processor, fields, model)
        side, patch = model.vision["image_size"], model.vision["patch_size"]
        return processor_of(processor.tokenizer, side, patch)


def processor_of(tokenizer: Any, side: int, patch: int) -> LlavaProcessor:
    size = {"height": side, "width": side}
    return LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": side}, crop_size=size),
        tokenizer=tokenizer,
        patch_size=patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


@pytest.fixture
def registered() -> Iterator[None]:
    """Registered as by ``@register_family``, for one test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
        patch.setattr(released, "RELEASED", dict(released.RELEASED))
        assert register_family(Llava) is Llava
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer, path = llama_tokenizer(500), tmp_path_factory.mktemp("llava")
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 4096,
    }
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(
        text_config=text,
        vision_config=CLIP_VISION,
        image_token_index=image_token,
        image_seq_length=16,
    )
    model = LlavaForConditionalGeneration(config).eval()
    randomize(model, 0)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(path)
    processor_of(tokenizer, 56, 14).save_pretrained(path)
    return path


@pytest.mark.daily("images1", "images2")
@pytest.mark.parametrize("images", [[], [noise(70, 90)], [noise(40, 40, 1), noise(96, 64, 2)]])
def test_answers_are_those_of_transformers(registered, folder: Path, images: list[Any]) -> None:
    assert pipeline_for(str(folder)) is OscarVLPipeline
    pipe = OscarVLPipeline(folder, policy="bf16", device="cpu", prefill_chunk=16)
    assert type(pipe.family) is Llava and decoder.supports(pipe.model)
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    text = "USER: " + "<image>\n" * len(images) + "What is it? ASSISTANT:"
    inputs = processor(text=[text], images=images or None, return_tensors="pt")
    made = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    expected = made[0, inputs["input_ids"].shape[1] :].tolist()
    answer = pipe(images, "What is it?", max_new_tokens=32)
    assert answer.token_ids == [token for token in expected if token != 2]
    assert answer.prompt_tokens == inputs["input_ids"].shape[1]


def test_packed_chat(registered, folder: Path) -> None:
    pipe = OscarVLPipeline(folder, device="cpu")
    with pipe.chat() as chat:
        chat.ask("What is it? " * 20, [noise(70, 90)], max_new_tokens=8)
        answer = chat.ask("And this?", [noise(40, 40)], max_new_tokens=8)
        assert answer.memory.kv_bytes < answer.memory.bf16_bytes
        assert [one.label for one in chat.segments if one.modality is Modality.IMAGE]


def test_its_released_model_is_planned(registered) -> None:
    made = plan("llava-1.5-7b", Session(images=2), "bf16")
    assert made.family == "LLaVA-1.5" and made.tokens["image"] == 2 * 576
    assert made.shape.parameters / 1e6 == pytest.approx(7063.4, abs=1)


def test_unknown_before() -> None:
    with pytest.raises(InputError, match="'llava' is not supported: OscarVLPipeline supports"):
        registry.family_of("llava")


def test_a_model_type_has_one_family(registered) -> None:
    class Other(Llava):
        pass

    with pytest.raises(ValueError, match="Other: Llava already supports model type 'llava'"):
        register_family(Other)
