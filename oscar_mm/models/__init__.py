"""Models by name: the folder or hub id that a name stands for, told without importing torch.

The bundled models need no network: each name stands for a folder here. They are tiny;
examples/train_pocket trains them for tests and demos. The README.md in each folder says what its
model can do.

Of released models there are the shapes of their config.json and the limits of their processors, so
that memory can be planned without the hub.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oscar_mm.errors import InputError, suggestion

BUNDLED = {
    "pocket-vl": "reads printed codes, short receipts and coloured shapes",
    "pocket-llava": "reads printed codes and short receipts",
    "pocket-omni": "hears spoken digits and a few words, reads codes, short receipts and shapes",
}
"""Name of each model, and what it can do; Qwen3-VL, LLaVA-v1.6 and Qwen3-Omni in this order."""
_TIMEOUT_S = 1.5
_TIMEOUT_VARIABLE = "HF_HUB_ETAG_TIMEOUT"


def bundled(model: str | Path) -> Path | None:
    """The folder of a bundled model, or None if ``model`` names none.

    A name wins over a folder of the same name in the working directory; "./pocket-vl" is that
    folder, and a ``Path`` always means a folder.
    """
    if isinstance(model, str) and model in BUNDLED:
        return Path(__file__).parent / model
    return None


def description(name: str) -> str:
    """A bundled model in a line: "pocket-vl, 5M parameters, a bundled demo model that ..."."""
    weights = Path(__file__).parent / name / "model.safetensors"
    millions = weights.stat().st_size / 2e6
    skills = f"{BUNDLED[name]}; it knows nothing else"
    return f"{name}, {millions:.0f}M parameters, a bundled demo model that {skills}"


def source_of(model: Any) -> str:
    """Hub id or folder, as far as that can be told without the hub.

    Raises:
        InputError: neither, and no name of a bundled model.
    """
    if not isinstance(model, str | Path):
        raise InputError(
            "model must be a bundled model's name, a hub id, a folder or a loaded model, not "
            f"{type(model).__name__}"
        )
    if not str(model).strip():
        raise InputError(f"model is empty: {remedy()}")
    if (folder := bundled(model)) is not None:
        return str(folder)
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise InputError(f"model {model}: the folder has no config.json, so it is no checkpoint")
    if path.is_file():
        raise InputError(f"model {model}: is a file; give the folder of a checkpoint")
    # A hub id is "owner/name", and begins with a letter or digit.
    is_path = isinstance(model, Path) or path.is_absolute() or len(path.parts) != 2
    if not path.is_dir() and (is_path or str(model).startswith((".", "~"))):
        raise InputError(f"model {model}: no such folder; {remedy(str(model))}")
    return str(model)


def check_source(model: str | Path, options: Mapping[str, Any] | None = None) -> None:
    """Refuse a model that cannot be had, within two seconds; transformers tries for half a minute.

    Only the configuration is looked for: in the folder, in the hub's cache, then on the hub.

    Args:
        model: name of a bundled model, folder or hub id.
        options: for ``from_pretrained``, of which those count that say where files are: cache_dir,
            revision, subfolder, token.

    Raises:
        InputError: there is none, or the hub does not answer.
    """
    source, given = source_of(model), options or {}
    if Path(source).is_dir() or given.get("local_files_only"):
        return  # Without the hub transformers fails at once.
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    # Of httpx or httpx2, by the version of huggingface_hub.
    connection_error: Any = HfHubHTTPError.__bases__[0]
    seconds = float(os.environ.get(_TIMEOUT_VARIABLE, _TIMEOUT_S))
    revision, folder = given.get("revision"), given.get("subfolder") or ""
    name = f"{folder}/config.json" if folder else "config.json"
    try:
        known = try_to_load_from_cache(source, name, given.get("cache_dir"), revision)
        if isinstance(known, str):
            return
        url = hf_hub_url(source, name, revision=revision)
        get_hf_file_metadata(url, token=given.get("token"), timeout=seconds)
    except HFValidationError:
        problem = "no hub id"
    except OfflineModeIsEnabled:
        problem = "not on this machine, and HF_HUB_OFFLINE keeps it from the hub"
    except GatedRepoError:
        problem = "the hub asks for permission; accept its terms there, then run `hf auth login`"
    except RepositoryNotFoundError:
        problem = "not on this machine, and not on the hub or private (`hf auth login`)"
    except EntryNotFoundError:
        problem = "has no config.json on the hub, so it is no checkpoint"
    except HfHubHTTPError as error:
        problem = f"the hub answered {error.response.status_code}; try again"
    except connection_error as error:
        problem = f"not on this machine, and the hub cannot be reached ({type(error).__name__})"
        if "Timeout" in type(error).__name__:
            problem += f" in {seconds:g} s; {_TIMEOUT_VARIABLE}=10 waits longer"
    else:
        return
    raise InputError(f"model {source}: {problem}; {remedy(source)}")


def remedy(name: str = "") -> str:
    """What to give as a model, and what ``name`` may have been meant to be."""
    meant = {known: known for known in BUNDLED}
    for short, model in RELEASED.items():
        meant |= {short: model.source, model.source: model.source}
    return (
        "give the folder of a checkpoint, a hub id such as Qwen/Qwen3-VL-8B-Instruct or one of the "
        f"bundled models {', '.join(BUNDLED)}{suggestion(name, meant)}"
    )


@dataclass(frozen=True)
class ReleasedModel:
    """Shapes of a released model.

    Attributes:
        source: hub id of the checkpoint that has these in config.json and preprocessor_config.json.
        family: ``config.model_type``.
        text: fields of text_config that give shapes and RoPE.
        vision, audio: fields of vision_config and audio_config.
        pixels: least and most pixels of an image.
        part: the part of the checkpoint that these are of; "" for all of it.
    """

    source: str
    family: str
    text: dict[str, Any]
    vision: dict[str, Any]
    audio: dict[str, Any] = field(default_factory=dict)
    pixels: tuple[int, int] = (65536, 16777216)
    part: str = ""


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


_MROPE = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 32064,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}
_QWEN = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
} | _rope(5e6, **_MROPE)
_MOE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
} | _rope(5e6, **_MROPE)
_QWEN_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_SMALL_QWEN_VISION = _QWEN_VISION | {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "deepstack_visual_indexes": [5, 11, 17],
}
_QWEN_AUDIO = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "output_dim": 2048,
    "downsample_hidden_size": 480,
    "max_source_positions": 1500,
    "n_window": 50,
    "n_window_infer": 800,
    "conv_chunksize": 500,
}


def _llava(name: str, **text: Any) -> ReleasedModel:
    return ReleasedModel(f"llava-hf/{name}-hf", "llava_next", _LLAMA | text, _CLIP)


def _qwen(size: str, vision: dict[str, Any], **text: Any) -> ReleasedModel:
    merged = _QWEN | text
    vision = vision | {"out_hidden_size": merged["hidden_size"]}
    return ReleasedModel(f"Qwen/Qwen3-VL-{size}-Instruct", "qwen3_vl", merged, vision)


_MODELS = (
    _qwen(
        "2B",
        _SMALL_QWEN_VISION,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    _qwen(
        "4B",
        _SMALL_QWEN_VISION,
        hidden_size=2560,
        intermediate_size=9728,
        tie_word_embeddings=True,
    ),
    _qwen("8B", _QWEN_VISION),
    _qwen(
        "32B",
        _QWEN_VISION,
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
    ),
    ReleasedModel(
        "Qwen/Qwen3-VL-30B-A3B-Instruct",
        "qwen3_vl_moe",
        _MOE,
        _QWEN_VISION | {"out_hidden_size": 2048},
    ),
    ReleasedModel(
        "Qwen/Qwen3-Omni-30B-A3B-Instruct",
        "qwen3_omni_moe",
        _MOE
        | {"vocab_size": 152064, "intermediate_size": 768, "max_position_embeddings": 65536}
        | _rope(1e6, **_MROPE),
        _QWEN_VISION | {"out_hidden_size": 2048},
        audio=_QWEN_AUDIO,
        pixels=(3136, 12845056),
        part="the thinker",
    ),
    _llava("llava-v1.6-vicuna-7b", **_rope(10000.0)),
    _llava(
        "llava-v1.6-mistral-7b",
        model_type="mistral",
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        sliding_window=None,
        **_rope(1e6),
    ),
    _llava(
        "llava-v1.6-vicuna-13b",
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=40,
        **_rope(10000.0),
    ),
    _llava(
        "llava-v1.6-34b",
        vocab_size=64064,
        hidden_size=7168,
        intermediate_size=20480,
        num_hidden_layers=60,
        num_attention_heads=56,
        num_key_value_heads=8,
        **_rope(5e6),
    ),
)


def _short(source: str) -> str:
    """The name without its owner and the ends in which checkpoints of the same shape differ."""
    name = source.rpartition("/")[2].lower()
    for end in ("-hf", "-instruct", "-thinking"):
        name = name.removesuffix(end)
    return name


RELEASED = {_short(model.source): model for model in _MODELS}
"""Shapes by short name: "qwen3-vl-8b", "llava-v1.6-vicuna-7b", ..."""


def released_model(name: str | Path) -> ReleasedModel | None:
    """The shapes of a released model, or None for another name; a folder of the name wins.

    Args:
        name: hub id, with or without its owner: "Qwen/Qwen3-VL-8B-Instruct", "qwen3-vl-8b".
    """
    if isinstance(name, Path) or Path(name).is_dir():
        return None
    return RELEASED.get(_short(name))
