"""Random stand-ins: released models with random weights, caches with random keys and values.

The models have the sizes in their released config.json; they are created on the device, without
access to the hub. Answers of an endless pipeline end only at their limit. Caches have one layer,
which is filled in the same way as by attention "oscar".
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3OmniMoeProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    WhisperFeatureExtractor,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm

import oscar_mm.pipelines
from oscar_mm import KVPolicy, OscarCache
from oscar_mm.cache.layer import OscarLayer
from oscar_mm.cache.step_plan import StepPlan
from oscar_mm.fast_decode.row_adapters import AdaptedLinear, RowAdapters
from oscar_mm.modality import Modality
from oscar_mm.models.released import RELEASED as SHAPES
from oscar_mm.models.released import ReleasedModel
from oscar_mm.pipelines import OscarOmniPipeline, OscarVLPipeline
from oscar_mm.pipelines.loading import device_of
from oscar_mm.pipelines.pipeline import Pipeline
from oscar_mm.pipelines.registry import family_of
from oscar_mm.pipelines.weight_formats import quantize
from oscar_mm.quant.balance import sigma_from_rms
from tests.tiny import TEXT, llama_tokenizer, qwen_tokenizer
from tests.tiny_llava_next import MEDIA as LLAVA_MEDIA
from tests.tiny_llava_next import TEMPLATES as LLAVA_TEMPLATES
from tests.tiny_qwen3_omni import OMNI_SPECIAL, ROLES
from tests.tiny_qwen3_omni import TEMPLATE as QWEN_TEMPLATE

NEVER = 1 << 30
"""End token that no model samples, so that every answer has its maximum length."""
_LONGEST_TEXT = 1 << 20
_ROUND, _ROUND_TEXT = 512, 64
_PIECE_ELEMENTS = 1 << 26
"""Number of elements of the keys that are stored at a time: 128 MB in bfloat16."""


@dataclass(frozen=True)
class Released(ReleasedModel):
    """Shapes of a released model, with methods to change them for a benchmark.

    Attributes:
        weights: format that the decoder's weights are quantized to; None for 16 bits.
        adapters: number of LoRA adapters, of which each row of a step has one.
        fused: whether layers are of a class that the fast decoder knows; if not, they run as
            modules.
    """

    weights: str | None = None
    adapters: int = 0
    fused: bool = True

    def with_positions(self, least: int) -> Released:
        """Return the same model with at least ``least`` positions.

        Positions have no weights, because the models use RoPE.
        """
        released = self.text["max_position_embeddings"]
        return replace(self, text=self.text | {"max_position_embeddings": max(released, least)})

    def tiny(self) -> Released:
        """Return a small version of the model for a CPU.

        It has every type of layer that the model has, and at most 4 query heads per KV head.
        """
        queries = min(self.text["num_attention_heads"] // self.text["num_key_value_heads"], 4)
        text = {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": max(queries, 2),
            "num_key_value_heads": max(queries, 2) // queries,
            "vocab_size": 800,
        }
        if self.family == "qwen2_5_vl":  # It does not read head_dim.
            text["hidden_size"] = self.text["head_dim"] * text["num_attention_heads"]
        if "linear_num_value_heads" in self.text:
            states = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
            states |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
            text |= states | {"num_hidden_layers": 4}  # One of them has attention.
        if "num_experts" in self.text:
            text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        if "shared_expert_intermediate_size" in self.text:
            text |= {"shared_expert_intermediate_size": 32}
        vision = {"hidden_size": 32, "intermediate_size": 64}
        if self.family == "llava_next":
            heads = {"num_hidden_layers": 3, "num_attention_heads": 2}
            vision |= heads | {"image_size": 56, "projection_dim": 32}
        else:
            vision |= {"depth": 3, "num_heads": 2, "out_hidden_size": text["hidden_size"]}
            vision |= {"num_position_embeddings": 64}
        if "deepstack_visual_indexes" in self.vision:
            vision |= {"deepstack_visual_indexes": [0, 1]}
        audio = {
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "d_model": 32,
            "output_dim": 64,
            "downsample_hidden_size": 16,
        }
        return replace(
            self,
            text=self.text | text,
            vision=self.vision | vision,
            audio=self.audio and self.audio | audio,
            pixels=(1024, 65536),
        )


RELEASED = {
    name: Released(**vars(SHAPES[shape]))
    for name, shape in {
        "llava-1.6-vicuna-7b": "llava-v1.6-vicuna-7b",
        "llava-1.6-mistral-7b": "llava-v1.6-mistral-7b",
        "qwen3-vl-8b": "qwen3-vl-8b",
        "qwen3-vl-30b-a3b": "qwen3-vl-30b-a3b",
        "qwen3-omni-30b-a3b": "qwen3-omni-30b-a3b",
    }.items()
}

RELEASED["qwen3.5-9b"] = Released(
    "Qwen/Qwen3.5-9B",
    "qwen3_5",
    {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
    # As Qwen3-VL, without features for the decoder's layers.
    {k: v for k, v in SHAPES["qwen3-vl-8b"].vision.items() if k != "deepstack_visual_indexes"},
)
"""A hybrid: three of four layers keep states. Only benchmarks use this shape, so it is not in
``SHAPES``."""
_27B = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "linear_num_value_heads": 48,
}
RELEASED["qwen3.5-27b"] = replace(
    RELEASED["qwen3.5-9b"],
    source="Qwen/Qwen3.5-27B",
    text=RELEASED["qwen3.5-9b"].text | _27B,
    vision=RELEASED["qwen3.5-9b"].vision | {"out_hidden_size": 5120},
)
_9B = RELEASED["qwen3.5-9b"]
_EXPERTS = {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
RELEASED["qwen3.5-35b-a3b"] = replace(
    _9B,
    source="Qwen/Qwen3.5-35B-A3B",
    family="qwen3_5_moe",
    text={k: v for k, v in _9B.text.items() if k != "intermediate_size"} | _EXPERTS,
    vision=_9B.vision | {"out_hidden_size": 2048},
)

RANDOM_MODELS = RELEASED | {
    f"{name}-{weights}": replace(RELEASED[name], weights=weights)
    for name in ("qwen3-vl-8b", "qwen3-vl-30b-a3b")
    for weights in ("fp8", "int4")
}
RANDOM_MODELS |= {
    f"qwen3-vl-8b-lora-{count}": replace(RELEASED["qwen3-vl-8b"], adapters=count)
    for count in (1, 4)
}
_7B = Released(**vars(SHAPES["qwen2.5-vl-7b"]))
_7B = replace(_7B, text=_7B.text | {"head_dim": 128})
RANDOM_MODELS |= {"qwen2.5-vl-7b": _7B, "qwen2.5-vl-7b-modules": replace(_7B, fused=False)}
"""Released models, also with quantized weights, adapters, or layers of an unknown class."""
_RANK = 16
"""Rank of each adapter."""


def build(
    released: Released,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    talker: Mapping[str, Any] | None = None,
) -> tuple[PreTrainedModel, Any]:
    """Create a model with random weights, and a processor with a tokenizer of a few hundred tokens.

    The weights are initialized on the device, not on the CPU.

    Args:
        released: shapes of the model.
        device: device on which the weights are created.
        dtype: dtype of the weights.
        seed: seed of the random weights.
        talker: configurations of the talker and of code2wav of a Qwen3-Omni; None for a model that
            cannot speak.
    """
    model_class, config, processor = FAMILIES[released.family](released)
    if talker is not None:
        config = _speaking(config, processor.tokenizer, talker)
    config.dtype = dtype
    with torch.device("meta"):
        model = model_class._from_config(config, dtype=dtype)
    model = model.to_empty(device=device)
    # This initializes buffers such as RoPE frequencies, and sets weights to default values.
    model.initialize_weights()
    _fill(model, torch.Generator(device).manual_seed(seed))
    text = family_of(released.family).text_part(model)
    if released.weights is not None:
        quantize(model, text.get_decoder(), released.weights)
    if released.adapters:
        _adapt(text, released.adapters)
    for layer in () if released.fused else text.get_decoder().layers:
        layer.__class__ = type("UnknownLayer", (type(layer),), {})
    ends = GenerationConfig(do_sample=False, eos_token_id=NEVER)
    for part in {model, getattr(model, "thinker", model)}:
        part.generation_config = ends
    processor.tokenizer.model_max_length = _LONGEST_TEXT
    return model.eval(), processor


@torch.no_grad()
def _fill(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Fill weights with random values, such that linear layers preserve the norm of their input.

    Queries have larger norms than keys, and the embedding is small compared with what layers add,
    so that logits depend on the full context.
    """
    centered = (Qwen3_5RMSNorm, Qwen3_5MoeRMSNorm)
    stored_minus_1 = {
        f"{name}.weight" for name, one in model.named_modules() if isinstance(one, centered)
    }
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            of_norm = "norm" in name and name.endswith("weight")
            center, std = (1.5 if "q_norm" in name else 1.0, 0.1) if of_norm else (0.0, 0.1)
            center -= name in stored_minus_1
        elif "embed_tokens" in name:
            center, std = 0.0, 0.5
        else:
            # The weights of experts are stacked: (experts, out, in).
            inputs = weight.shape[-1] if ".experts." in name else weight[0].numel()
            center, std = 0.0, inputs**-0.5
        weight.normal_(center, std, generator=generator)


@torch.no_grad()
def _adapt(text: Any, count: int) -> None:
    """Put ``count`` random LoRA adapters around each projection of a text model's decoder."""
    for path, module in list(text.get_decoder().named_modules()):
        if path.endswith("_proj"):
            weight, ranks = module.weight, count * _RANK
            down = torch.randn(ranks, weight.shape[1], dtype=weight.dtype, device=weight.device)
            up = torch.randn(len(weight), ranks, dtype=weight.dtype, device=weight.device)
            adapted = AdaptedLinear(module, down / weight.shape[1] ** 0.5, up / 10)
            text.get_decoder().set_submodule(path, adapted)
    idle = torch.ones(count + 1, count * _RANK, dtype=torch.bool)
    for place in range(count):
        idle[place + 1, place * _RANK : (place + 1) * _RANK] = False
    RowAdapters({str(i): str(i) for i in range(count)}, idle.to(text.device)).attach(text)


def _llava_next(released: Released) -> tuple[type[PreTrainedModel], Any, Any]:
    tokenizer, vision = llama_tokenizer(700), released.vision
    side = vision["image_size"]
    grid = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
    pinpoints = [[side * rows, side * columns] for rows, columns in grid]
    template = LLAVA_TEMPLATES[released.text["model_type"]]
    processor = LlavaNextProcessor(
        image_processor=LlavaNextImageProcessor(
            size={"shortest_edge": side},
            crop_size={"height": side, "width": side},
            image_grid_pinpoints=pinpoints,
        ),
        tokenizer=tokenizer,
        patch_size=vision["patch_size"],
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template.strip().replace("MEDIA", LLAVA_MEDIA),
    )
    config = LlavaNextConfig(
        text_config=dict(released.text),
        vision_config=dict(vision),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=pinpoints,
        image_seq_length=(side // vision["patch_size"]) ** 2,
    )
    return LlavaNextForConditionalGeneration, config, processor


def _qwen3_vl(
    released: Released,
    config_class: type[Any] = Qwen3VLConfig,
    model_class: type[PreTrainedModel] = Qwen3VLForConditionalGeneration,
) -> tuple[type[PreTrainedModel], Any, Any]:
    tokenizer = qwen_tokenizer(520)
    processor = Qwen3VLProcessor(
        tokenizer=tokenizer,
        chat_template=QWEN_TEMPLATE,
        image_processor=_images(released),
        video_processor=Qwen3VLVideoProcessor(patch_size=16, merge_size=2),
    )
    config = config_class(
        text_config=dict(released.text),
        vision_config=dict(released.vision),
        tie_word_embeddings=False,
        **_places(tokenizer, "image", "video"),
    )
    return model_class, config, processor


def _qwen2_5_vl(released: Released) -> tuple[type[PreTrainedModel], Any, Any]:
    tokenizer = qwen_tokenizer(520)
    processor = Qwen2_5_VLProcessor(
        image_processor=_images(released, 14),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(patch_size=14, merge_size=2),
        chat_template=QWEN_TEMPLATE,
    )
    config = Qwen2_5_VLConfig(
        text_config=dict(released.text),
        vision_config=dict(released.vision),
        tie_word_embeddings=False,
        **_places(tokenizer, "image", "video"),
    )
    return Qwen2_5_VLForConditionalGeneration, config, processor


def _qwen3_omni(released: Released) -> tuple[type[PreTrainedModel], Any, Any]:
    names = {f"{kind}_token": f"<|{kind}_pad|>" for kind in ("image", "audio", "video")}
    for kind in ("vision", "audio"):
        names |= {f"{kind}_bos_token": f"<|{kind}_start|>", f"{kind}_eos_token": f"<|{kind}_end|>"}
    tokenizer = qwen_tokenizer(520, OMNI_SPECIAL, ROLES, **names)
    processor = Qwen3OmniMoeProcessor(
        tokenizer=tokenizer,
        chat_template=QWEN_TEMPLATE,
        image_processor=_images(released),
        video_processor=Qwen2VLVideoProcessor(patch_size=16, merge_size=2),
        feature_extractor=WhisperFeatureExtractor(feature_size=128, return_attention_mask=True),
    )
    token = tokenizer.convert_tokens_to_ids
    thinker = {
        "text_config": dict(released.text),
        "vision_config": dict(released.vision),
        "audio_config": dict(released.audio),
        "position_id_per_seconds": 13,
        "user_token_id": token("user"),
        "audio_start_token_id": token("<|audio_start|>"),
        "tie_word_embeddings": False,
        **_places(tokenizer, "image", "video", "audio"),
    }
    config = Qwen3OmniMoeConfig(
        thinker_config=thinker,
        enable_audio_output=False,
        im_start_token_id=token("<|im_start|>"),
        im_end_token_id=token("<|im_end|>"),
        **{f"{role}_token_id": token(role) for role in ROLES},
    )
    return Qwen3OmniMoeForConditionalGeneration, config, processor


def _speaking(config: Any, tokenizer: Any, talker: Mapping[str, Any]) -> Any:
    """Return the configuration of a Qwen3-Omni whose talker fits its thinker and tokenizer."""
    fields, token = config.to_dict(), tokenizer.convert_tokens_to_ids
    names = {"pad": "<tts_pad>", "bos": "<tts_text_bos>", "eos": "<tts_text_eod>"}
    fields |= {f"tts_{name}_token_id": token(text) for name, text in names.items()}
    hidden = config.thinker_config.text_config.hidden_size
    own = talker["talker_config"] | {"thinker_hidden_size": hidden}
    own |= _places(tokenizer, "image", "video", "audio")
    return type(config)(**fields | talker | {"talker_config": own, "enable_audio_output": True})


def _images(released: Released, patch: int = 16) -> Qwen2VLImageProcessor:
    least, most = released.pixels
    return Qwen2VLImageProcessor(
        patch_size=patch,
        merge_size=2,
        size={"shortest_edge": least, "longest_edge": most},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def _places(tokenizer: Any, *kinds: str) -> dict[str, int]:
    token = tokenizer.convert_tokens_to_ids
    places = {f"{kind}_token_id": token(f"<|{kind}_pad|>") for kind in kinds}
    edges = {f"vision_{edge}_token_id": token(f"<|vision_{edge}|>") for edge in ("start", "end")}
    return places | edges


FAMILIES: dict[str, Callable[[Released], tuple[type[PreTrainedModel], Any, Any]]] = {
    "llava_next": _llava_next,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": partial(
        _qwen3_vl,
        config_class=Qwen3VLMoeConfig,
        model_class=Qwen3VLMoeForConditionalGeneration,
    ),
    "qwen3_5": partial(
        _qwen3_vl, config_class=Qwen3_5Config, model_class=Qwen3_5ForConditionalGeneration
    ),
    "qwen3_5_moe": partial(
        _qwen3_vl, config_class=Qwen3_5MoeConfig, model_class=Qwen3_5MoeForConditionalGeneration
    ),
    "qwen3_omni_moe": _qwen3_omni,
}


def make_endless(pipe: Pipeline) -> Pipeline:
    """Make a pipeline's greedy answers end only at their limit, with text in every token.

    Tokens without text, or with only a part of a character, get the logit 0, which is lower than
    the logits of other tokens. A server sends no piece for such a token, so a client could not
    observe its time.
    """
    tokenizer = pipe.processor.tokenizer
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))], skip_special_tokens=True)
    silent = [place for place, text in enumerate(texts) if not text or "\ufffd" in text]
    weight = pipe.model.get_output_embeddings().weight
    if weight is pipe.model.get_input_embeddings().weight:
        raise ValueError(
            "the output layer shares its weights with the input embedding; use a model whose "
            "embeddings are not tied"
        )
    with torch.no_grad():
        weight[silent] = 0
        weight[len(texts) :] = 0
    pipe.model.generation_config.eos_token_id = NEVER
    return pipe


def random_pipeline(
    name: str,
    *,
    tiny: bool = False,
    device: str | None = None,
    device_map: str | None = None,
    dtype: str | None = None,
    **options: Any,
) -> Pipeline:
    """Create a pipeline for a released model with random weights.

    Args:
        name: key of ``RANDOM_MODELS``.
        tiny: whether to use a small version of the model.
        device: device of the model; by default a GPU if there is one.
        device_map: must be None, because only a single device is supported.
        dtype: dtype of the model; by default bfloat16 on a GPU, and float32 on a CPU.
        options: options of the pipeline.
    """
    if device_map is not None:
        raise ValueError(
            "device_map: a model with random weights is created on one device; pass device instead"
        )
    released, target = RANDOM_MODELS[name], device_of(device)
    default = "float32" if target.type == "cpu" else "bfloat16"
    model, processor = build(
        released.tiny() if tiny else released, target, getattr(torch, dtype or default)
    )
    kind = OscarOmniPipeline if released.audio else OscarVLPipeline
    return kind(model, processor=processor, **options)


def endless_pipeline(
    model: str | Path,
    *,
    tiny: bool = False,
    usual: Callable[[str | Path], Callable[..., Pipeline]] = oscar_mm.pipelines.pipeline_for,
    **options: Any,
) -> Pipeline:
    """Create a pipeline whose answers end only at their limit.

    Args:
        model: key of ``RANDOM_MODELS`` for a model with random weights, or a model for ``usual``.
        tiny: whether to use a small version of a random model.
        usual: function that returns the pipeline class of any other model.
        options: options of the pipeline.
    """
    if model in RANDOM_MODELS:
        return make_endless(random_pipeline(str(model), tiny=tiny, **options))
    return make_endless(usual(model)(model, **options))


def words(count: int, seed: int) -> str:
    """Return a text of ``count`` words in a random order."""
    return " ".join(random.Random(seed).choices(TEXT.split(), k=count))


def text_and_images(tokens: int) -> torch.Tensor:
    """Return (tokens,) modality ids that alternate between 64 text and 448 image tokens."""
    in_round = torch.arange(tokens) % _ROUND
    return torch.where(in_round < _ROUND_TEXT, int(Modality.TEXT), int(Modality.IMAGE))


def begin_step(
    cache: OscarCache, keys: torch.Tensor, values: torch.Tensor
) -> tuple[OscarLayer, StepPlan]:
    """Begin a step that adds new tokens to layer 0; return the layer and its step plan."""
    cache.attend_packed(None)
    cache.update(keys, values, 0)
    return cache.layers[0], cache.step


def store_tokens(cache: OscarCache, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Store new tokens in layer 0."""
    layer, step = begin_step(cache, keys, values)
    layer.append(keys, values, step)


def synthetic_cache(
    policy: str | KVPolicy,
    shape: tuple[int, int, int, int],
    generator: torch.Generator,
    answer: int = 0,
) -> OscarCache:
    """Create a cache of one layer that contains random keys and values in bfloat16.

    The prompt consists of text and images.

    Args:
        policy: a KVPolicy or the name of a preset.
        shape: batch, KV heads, tokens, head_dim.
        generator: source of the random numbers, on the device of the cache.
        answer: number of the last tokens, which are stored one at a time, as text.
    """
    batch, kv_heads, tokens, head_dim = shape

    def normal(heads: int, count: int) -> torch.Tensor:
        size = (batch, heads, count, head_dim)
        device = generator.device
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

    cache = OscarCache(policy)
    sizes = torch.rand(2, kv_heads, head_dim, generator=generator, device=generator.device) + 0.5
    cache.sigmas = {0: sigma_from_rms(*sizes)} if cache.policy.balances else {}
    prompt = tokens - answer
    cache.expect(text_and_images(prompt).expand(batch, prompt))
    piece = max(_ROUND, _PIECE_ELEMENTS // (batch * kv_heads * head_dim))
    for start in range(0, prompt, piece):
        count = min(piece, prompt - start)
        store_tokens(cache, normal(kv_heads, count), normal(kv_heads, count))
    for _ in range(answer):
        store_tokens(cache, normal(kv_heads, 1), normal(kv_heads, 1))
    return cache
