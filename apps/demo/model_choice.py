"""ModelChoice: the model that the page serves next, and the models that this machine has."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from oscar_mm.errors import InputError
from oscar_mm.models import BUNDLED
from oscar_mm.pipelines.registry import find_family

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Hosts whose pages only this machine can open, so that strangers choose no model."""


class ModelChoice:
    """Choice of another model, which ends the page so that the server starts one with that model.

    Args:
        current: model of the page, as the server was given it.
        models: other models that may be chosen.
        failure: why the model that was chosen before could not be loaded; "" if it could.
    """

    def __init__(self, current: str, models: Sequence[str] = (), failure: str = "") -> None:
        self.current, self.failure = current, failure
        self.models = list(dict.fromkeys((current, *models)))
        self.chosen: str | None = None
        self.made = threading.Event()

    def choose(self, model: str) -> None:
        """Choose the next model; the page ends soon.

        Raises:
            InputError: if the model is not one of ``models``, is the current one, or another one
                was chosen already.
        """
        if model not in self.models:
            raise InputError("the model is not on the list of this page: choose one of that list")
        if model == self.current:
            raise InputError(f"{model} is the model of this page: choose another one")
        if self.made.is_set():
            raise InputError("another model is being loaded: wait until this page reloads")
        self.chosen = model
        self.made.set()


def local_models(host: str) -> list[str]:
    """Return the models on this machine that a page at this host may switch to: the bundled ones,
    and those in the hub's cache whose type is supported; none if others can open the page."""
    return [*BUNDLED, *sorted(_cached_models())] if host in LOOPBACK else []


def _cached_models() -> Iterator[str]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    with suppress(CacheNotFound):
        for repo in scan_cache_dir().repos:
            if repo.repo_type == "model" and any(
                _is_supported(revision.snapshot_path) for revision in repo.revisions
            ):
                yield repo.repo_id


def _is_supported(folder: Path) -> bool:
    """Return whether a folder has weights and a configuration of a supported model type."""
    try:
        config = json.loads((folder / "config.json").read_text())
        model_type = config["model_type"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False
    has_weights = any(folder.glob("*.safetensors"))
    return has_weights and isinstance(model_type, str) and find_family(model_type) is not None
