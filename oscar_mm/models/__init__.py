"""Models by name: lookup of the folder or hub id that a name refers to, without importing torch.

The bundled models need no network access: each name refers to a folder in this package. They are
tiny and were trained for tests and demos by examples/train_pocket. The README.md in each folder
describes what the model can do.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from oscar_mm.errors import InputError, suggestion
from oscar_mm.models.released import RELEASED
from oscar_mm.models.weight_files import NAMES, check_files, weight_files

BUNDLED = {
    "pocket-vl": "reads printed codes, short receipts and coloured shapes",
    "pocket-llava": "reads printed codes and short receipts",
    "pocket-omni": "recognizes and speaks digits and some words, reads codes, receipts and shapes",
}
"""Name -> abilities of each bundled model: a Qwen3-VL, a LLaVA-v1.6 and a Qwen3-Omni."""
SAMPLES = Path(__file__).parents[1] / "samples"
"""Folder of pictures and recordings that the bundled models can read: ``contents.json`` says what
they show and say, ``questions.jsonl`` has questions about them with answers."""
ADAPTER_CONFIG = "adapter_config.json"
"""Configuration file of an adapter of peft, which names its base model."""
MAX_NAME = 256
"""Maximum length of a model's name for clients, in characters."""
_TIMEOUT_S = 1.5
_TIMEOUT_VARIABLE = "HF_HUB_ETAG_TIMEOUT"


def bundled(model: str | Path) -> Path | None:
    """Return the folder of a bundled model; None if ``model`` is not the name of a bundled model.

    The name of a bundled model takes precedence over a folder of the same name in the working
    directory; write "./pocket-vl" for that folder. A ``Path`` always means a folder.
    """
    if isinstance(model, str) and model in BUNDLED:
        return Path(__file__).parent / model
    return None


def is_adapter(model: object) -> bool:
    """Return whether a model is the folder of an adapter of peft, and not of a checkpoint.

    Only the names of the folder's files are read. Other values than a path are no adapter.
    """
    if not isinstance(model, str | Path) or not str(model).strip() or bundled(model) is not None:
        return False
    folder = Path(model)
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def is_name(name: object) -> bool:
    """Return whether clients can ask for a model or an adapter by this name."""
    return (
        isinstance(name, str)
        and bool(name.strip())
        and name.isprintable()
        and (len(name) <= MAX_NAME)
    )


def description(name: str) -> str:
    """Return a one-line description: "pocket-vl, 5M parameters, a bundled demo model that ..."."""
    weights = Path(__file__).parent / name / "model.safetensors"
    millions = weights.stat().st_size / 2e6
    skills = f"{BUNDLED[name]}; it knows nothing else"
    return f"{name}, {millions:.0f}M parameters, a bundled demo model that {skills}"


def source_of(model: Any, subfolder: str = "") -> str:
    """Return the hub id or folder of a model after all checks that do not need the hub.

    Args:
        model: name of a bundled model, folder or hub id.
        subfolder: folder of the checkpoint within the model's folder.

    Raises:
        InputError: if the model is not a hub id, a folder or the name of a bundled model.
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
    if is_adapter(path / subfolder):
        raise InputError(
            f"model {path}: the folder holds an adapter, which cannot be used in place of a "
            "checkpoint here; pass the base model, or merge the adapter (merge_and_unload)"
        )
    if path.is_dir() and not (path / subfolder / "config.json").is_file():
        raise InputError(
            f"model {path / subfolder}: the folder has no config.json, so it is not a checkpoint"
        )
    if path.is_file():
        raise InputError(f"model {model} is a file: pass the folder of the checkpoint")
    # A hub id is "owner/name", and begins with a letter or digit.
    is_path = isinstance(model, Path) or path.is_absolute() or len(path.parts) != 2
    if not path.is_dir() and (is_path or str(model).startswith((".", "~"))):
        raise InputError(f"model {model}: no such folder; {remedy(str(model))}")
    return str(model)


def check_source(model: str | Path, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Refuse a model that is not available, within two seconds.

    transformers would keep trying for minutes. Only the configuration is looked up: in the folder,
    or on the hub and in its cache.

    Args:
        model: name of a bundled model, folder or hub id.
        options: options for ``from_pretrained``, of which only cache_dir, local_files_only,
            revision, subfolder and token are used.

    Returns:
        The options; with local_files_only if the hub does not answer but its cache has the
        configuration, so that transformers reads the cache at once.

    Raises:
        InputError: if there is no such model, access to it is restricted, or the hub does not
            answer.
    """
    given = dict(options or {})
    revision, folder = given.get("revision"), given.get("subfolder") or ""
    source = source_of(model, folder)
    if Path(source).is_dir() or given.get("local_files_only"):
        return given  # In offline mode, transformers fails at once.
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    # The class is from httpx or httpx2, depending on the version of huggingface_hub.
    connection_error: Any = HfHubHTTPError.__bases__[0]
    seconds = float(os.environ.get(_TIMEOUT_VARIABLE, _TIMEOUT_S))
    name = f"{folder}/config.json" if folder else "config.json"
    known: Any = None
    try:
        known = try_to_load_from_cache(source, name, given.get("cache_dir"), revision)
        url = hf_hub_url(source, name, revision=revision)
        token = given.get("token")
        _within(seconds, lambda: get_hf_file_metadata(url, token=token, timeout=seconds))
    except HFValidationError:
        problem = "not a valid hub id"
    except OfflineModeIsEnabled:
        problem = "not on this machine, and HF_HUB_OFFLINE disables the hub"
    except GatedRepoError:
        problem = "access is restricted; accept the terms on the hub, then run `hf auth login`"
    except RepositoryNotFoundError:
        problem = "not on this machine, and either not on the hub or private (`hf auth login`)"
    except EntryNotFoundError:
        problem = "has no config.json on the hub, so it is not a checkpoint"
    except HfHubHTTPError as error:
        problem = f"the hub returned {error.response.status_code}; try again"
    except (connection_error, TimeoutError) as error:
        problem = f"not on this machine, and the hub cannot be reached ({type(error).__name__})"
        if "Timeout" in type(error).__name__:
            problem += f" in {seconds:g} s; set {_TIMEOUT_VARIABLE}=10 to wait longer"
    else:
        return given
    if isinstance(known, str):
        return given | {"local_files_only": True}
    raise InputError(f"model {source}: {problem}; {remedy(source)}")


def stored_bytes(source: str) -> int:
    """Return the bytes of a checkpoint's weights, in files of its folder or on the hub.

    Args:
        source: result of ``source_of``; a hub id that ``check_source`` has found.

    Raises:
        InputError: if there are no weight files, if one is missing or damaged, or if the files are
            not in the hub's cache, and it does not tell their sizes within two seconds.
    """
    folder = folder_of(source)
    files = [] if folder is None else weight_files(folder)
    if Path(source).is_dir() or (files and all(file.is_file() for file in files)):
        check_files(files)
        sizes = [file.stat().st_size for file in files]
    else:
        sizes = _sizes_on_hub(source)
    if not sizes:
        raise InputError(
            f"model {source}: there are no weights ({NAMES}); download the whole checkpoint"
        )
    return sum(sizes)


def check_weights(source: str, options: Mapping[str, Any] | None = None) -> None:
    """Refuse weight files on this machine that are missing or damaged.

    Args:
        source: result of ``source_of``.
        options: see ``check_source``.

    Raises:
        InputError: if the index is damaged, or a weight file is missing or damaged; the message
            names the file.
    """
    if (folder := folder_of(source, options)) is not None:
        check_files(weight_files(folder))


def folder_of(source: str, options: Mapping[str, Any] | None = None) -> Path | None:
    """Return the folder of a checkpoint on this machine.

    Args:
        source: result of ``source_of``.
        options: see ``check_source``.

    Returns:
        The folder itself, or that of a hub id in the hub's cache; None if the cache does not have
        its configuration.
    """
    given = dict(options or {})
    subfolder = given.get("subfolder") or ""
    if Path(source).is_dir():
        return Path(source) / subfolder
    from huggingface_hub import try_to_load_from_cache

    name = f"{subfolder}/config.json" if subfolder else "config.json"
    known: Any = try_to_load_from_cache(source, name, given.get("cache_dir"), given.get("revision"))
    return Path(known).parent if isinstance(known, str) else None


def _sizes_on_hub(source: str) -> list[int]:
    """Return the sizes of a hub id's weight files in bytes.

    Raises:
        InputError: if the hub does not tell them within two seconds.
    """
    from huggingface_hub import HfApi

    seconds = float(os.environ.get(_TIMEOUT_VARIABLE, _TIMEOUT_S))

    def ask() -> list[tuple[str, int]]:
        files = HfApi().model_info(source, files_metadata=True, timeout=seconds).siblings or []
        return [(file.rfilename, file.size or 0) for file in files]

    try:
        files: Any = _within(seconds, ask)
    except Exception as error:  # The hub's client has errors of several libraries.
        raise InputError(
            f"model {source}: its weights are not on this machine, and the hub does not tell their "
            f"size ({type(error).__name__}); try again, or pass the folder of the checkpoint"
        ) from error
    return [size for name, size in files if fnmatch(name, NAMES)]


def _within(seconds: float, ask: Callable[[], object]) -> object:
    """Wait for the result of a function in a thread of its own.

    The timeout of the hub's client does not bound all its waits: neither the lookup of the host's
    name, nor three seconds of another request before the first.

    Raises:
        Exception: the function's error, or ``TimeoutError``.
    """
    answer: Future[object] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="oscar-hub", daemon=True).start()
    return answer.result(seconds)


def remedy(name: str = "") -> str:
    """Return advice on what to pass as the model, and a suggestion if ``name`` is misspelled."""
    meant = {known: known for known in BUNDLED}
    for short, model in RELEASED.items():
        meant |= {short: model.source, model.source: model.source}
    return (
        "pass the folder of a checkpoint, a hub id such as Qwen/Qwen3-VL-8B-Instruct or one of the "
        f"bundled models {', '.join(BUNDLED)}{suggestion(name, meant)}"
    )
