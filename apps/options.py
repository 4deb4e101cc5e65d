"""Command-line options and option groups that commands share, and the API key of a server."""

import functools
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from oscar_mm.errors import InputError
from oscar_mm.media.kinds import kind_of
from oscar_mm.models import BUNDLED, bundled, check_source, description, is_adapter
from oscar_mm.policy import KVPolicy

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME|DIR|ID",
        help=f"A bundled model ({', '.join(BUNDLED)}), a model folder or a hub id; default: "
        "pocket-vl, or pocket-omni for audio.",
    ),
]
Media = Annotated[
    list[str] | None,
    typer.Argument(metavar="MEDIA", help="Images, videos and recordings, recognized by content."),
]
Policy = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"Cache format: {', '.join(KVPolicy.preset_names())}; with changes such as "
        "compact:window=128.",
    ),
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")]
AnswerLength = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        metavar="N",
        help="Maximum tokens of an answer and its reasoning; thinking models get more by default.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(metavar="D", help="cpu, cuda, cuda:1, ...; default: a GPU if available."),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(metavar="auto", help="Spread the model's layers over several GPUs."),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="bfloat16, float16 or float32. Default: the checkpoint's; on a CPU, float32.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="fp8|int4",
        help="Quantize the decoder's weights while the model is loaded. Default: as in the "
        "checkpoint.",
    ),
]
MaxContext = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Maximum tokens of a conversation and its answer. Default: the model's limit.",
    ),
]
PrefillChunk = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Maximum tokens of a prompt per pass; other requests run between passes. Attention is "
        "exact in shorter prompts. Default: 1024 on a CPU, 32768 on a GPU.",
    ),
]
AudioInVideo = Annotated[
    bool,
    typer.Option(
        "--audio-in-video", help="Use the sound of the videos; for models that support audio."
    ),
]
AllowRemote = Annotated[
    bool, typer.Option("--allow-remote", help="Fetch media given as http(s) URLs.")
]

TEXT_NEEDS_MODEL = (
    "--text needs --model, the folder or hub id of a language model: the bundled models answer "
    "questions about images and audio"
)
TEXT_NEEDS_LANGUAGE_MODEL = (
    "--text is for language models, and transformers does not load {} as one; ask it questions "
    "with media instead"
)
KEY_VARIABLE = "OSCAR_MM_API_KEY"
_KEY_BYTES = 4096
"""Maximum size of a key file, in bytes."""


@dataclass(frozen=True)
class SamplingOptions:
    """Command-line options for sampling; None selects the checkpoint's default."""

    max_new_tokens: AnswerLength = None
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="F",
            help="0 takes the likeliest token, above 0 samples. Default: the checkpoint's.",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="F", help="Sample from the likeliest tokens with this total probability."
        ),
    ] = None
    top_k: Annotated[
        int | None, typer.Option(metavar="N", help="Sample from the N likeliest tokens; 0 for all.")
    ] = None
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed for repeatable sampling.")] = (
        None
    )

    def checked(self) -> dict[str, Any]:
        """Validate the options before the model is loaded, and return those that are not None.

        Raises:
            InputError: if a value is not allowed.
        """
        options = {name: value for name, value in asdict(self).items() if value is not None}
        if options:
            from oscar_mm.engine.sampling import Sampling  # imports torch

            Sampling(**options)
        return options


@dataclass(frozen=True)
class PlacementOptions:
    """Command-line options for the devices, dtype and format of a model's weights."""

    device: Device = None
    device_map: DeviceMap = None
    dtype: Dtype = None
    weights: Weights = None
    drafts: Annotated[
        bool,
        typer.Option(
            "--drafts",
            help="Guess the next tokens with the checkpoint's own module (Qwen3.5), so that a "
            "request that decodes alone gets several tokens at a time.",
        ),
    ] = False


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command so that typer sees the fields of each option group as parameters.

    Fields without a typer option are left out. If a field allows several types, the option accepts
    text, which includes paths.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        group = groups.get(parameter.name)
        if group is None:
            parameters.append(parameter)
            continue
        parameters += [
            inspect.Parameter(name, parameter.kind, default=default, annotation=kind)
            for name, (kind, default) in _options_of(group).items()
        ]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{option: values.pop(option) for option in _options_of(group)})
        command(**values)

    vars(run)["__signature__"] = inspect.Signature(parameters)
    return run


def _options_of(group: Any) -> dict[str, tuple[Any, Any]]:
    """Return the annotation and default of each dataclass field that is a command-line option."""
    hints = get_type_hints(group, include_extras=True)
    found = {field.name: (_annotation(hints[field.name]), field.default) for field in fields(group)}
    return {name: option for name, option in found.items() if option[0] is not None}


def _annotation(hint: Any) -> Any:
    """Return a field's annotation for typer, with a single type; None if it is not an option."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for part in parts:
        if get_origin(part) is Annotated:
            kinds = get_args(part.__origin__)
            if str not in kinds:
                return part
            text = str | None if type(None) in kinds else str
            return Annotated[text, *part.__metadata__]
    return None


def by_kind(media: list[str]) -> dict[str, list[str]]:
    """Group files by "images", "videos" and "audio"; files of unknown kind count as images."""
    kinds: dict[str, list[str]] = {"images": [], "videos": [], "audio": []}
    for name in media:
        kinds[kind_of(name) or "images"].append(name)
    return kinds


def model_or_bundled(model: str | None, *, supports_audio: bool = False) -> str:
    """Return ``model``, or choose a bundled model and print its name to stderr.

    Args:
        model: model given by the user, or None.
        supports_audio: whether the model must support audio.

    Raises:
        InputError: if the model is not available. This is checked before torch is imported.
    """
    if model is not None:
        if not is_adapter(model):  # Its base model is found with peft, which imports torch.
            check_source(model)
        use_one_thread(model)
        return model
    name = "pocket-omni" if supports_audio else "pocket-vl"
    use_one_thread(name)
    print(f"oscar-mm: no --model given, so this is {description(name)}", file=sys.stderr)
    return name


def use_one_thread(model: str) -> None:
    """Let torch use one thread for a bundled model, unless OMP_NUM_THREADS is set.

    Tensors of bundled models are too small for threads, which then mostly wait for each other.
    Only for commands, because the number applies to the whole process.
    """
    if bundled(model) is None or "OMP_NUM_THREADS" in os.environ:
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    if (
        "torch" in sys.modules
    ):  # Detecting the kind of media imports it, and it has read the number.
        sys.modules["torch"].set_num_threads(1)


def api_key(file: Path | None) -> str | None:
    """Read the API key from a file or, if that is None, from the environment.

    No option takes the key itself, because options are visible in the list of processes.

    Raises:
        InputError: if the file cannot be read, or does not contain a key.
    """
    name = KEY_VARIABLE if file is None else str(file)
    if file is None:
        key = os.environ.get(KEY_VARIABLE)
        if key is None:
            return None
    else:
        try:
            with file.open("rb") as opened:
                key = opened.read(_KEY_BYTES + 1).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--api-key-file {name}: cannot be read ({error})") from None
    key = key.strip()
    if not key or len(key) > _KEY_BYTES or any(character.isspace() for character in key):
        raise InputError(f"{name}: must contain one key without spaces")
    return key
