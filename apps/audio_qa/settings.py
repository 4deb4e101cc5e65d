"""JobSettings: settings of an audio QA job, also the options of ``oscar-mm audio-qa``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

import typer

from oscar_mm.apps import options
from oscar_mm.errors import InputError
from oscar_mm.media import MediaLimits
from oscar_mm.policy import DEFAULT, KVPolicy


@dataclass(frozen=True)
class JobSettings:
    """Settings of an audio QA job; fields without a description here have an option's help text.

    With ``engine="vllm"``, each worker starts its own vLLM server with this package's KV cache, and
    ``policy`` must be the name of a preset. With ``server``, all workers use a running server. Both
    kinds of server support recordings and images. They support multiple choice only with
    ``list_choices``, so that the reply names a letter. ``batch_size``, ``use_audio_in_video``,
    ``video_fps`` and ``device`` are not supported with either kind of server; ``policy``,
    ``kv_budget`` and ``dtype`` are not supported with ``server``.

    Attributes:
        model: name of a bundled model, folder or hub id; with ``server``, name of the server's
            model, or None if it has only one.
        workers: number of Ray workers, each of which loads the model, starts a vLLM server or sends
            requests to the server. The default is one per GPU, or, with ``server`` or without GPUs,
            as many as the CPUs allow.
        video_fps: frames per second to sample from videos.
        limits: limits on media.
        api_key: API key for the server.

    Raises:
        InputError: if a value is not allowed, or two values conflict.
    """

    model: options.Model = None
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="oscar, or vllm to run the job on a vLLM server with this package's pages.",
        ),
    ] = "oscar"
    policy: options.Policy | KVPolicy = DEFAULT
    question: Annotated[
        str | None,
        typer.Option("--question", "-q", metavar="TEXT", help="Question for rows without one."),
    ] = None
    system: options.System = None
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", help="Maximum tokens of an answer.")
    ] = 64
    list_choices: Annotated[
        bool,
        typer.Option("--list-choices", help="List choices in the prompt and score their letters."),
    ] = False
    group_by: Annotated[
        str, typer.Option(metavar="FIELD", help="Field by which the summary is grouped.")
    ] = "group"
    batch_size: Annotated[
        int, typer.Option(metavar="N", help="Maximum number of rows at once.")
    ] = 32
    kv_budget: Annotated[
        str | int | None,
        typer.Option(metavar="SIZE", help='Maximum KV memory, such as "8GB".'),
    ] = None
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite/--resume",
            help="Start over, or continue with the existing answers (default).",
        ),
    ] = False
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Answer rows with an error again.")
    ] = False
    samples: Annotated[
        str | Path | None,
        typer.Option(metavar="FILE", help="Also write the answers in lmms-eval's samples format."),
    ] = None
    use_audio_in_video: options.AudioInVideo = False
    device: options.Device = None
    dtype: options.Dtype = None
    allow_remote: options.AllowRemote = False
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Use an OpenAI server instead of loading a model; --model is its model name.",
        ),
    ] = None
    concurrency: Annotated[
        int, typer.Option(metavar="N", help="Maximum concurrent requests to a server.")
    ] = 32
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help='Run on a Ray cluster; "local" for this machine.'),
    ] = None
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of models on the cluster; default: one per GPU."),
    ] = None
    cpus_per_worker: Annotated[int, typer.Option(metavar="N", help="CPUs per worker.")] = 1
    video_fps: float = 2.0
    limits: MediaLimits = field(default_factory=MediaLimits)
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if type(self.batch_size) is not int or self.batch_size < 1:
            raise InputError(f"batch_size={self.batch_size!r}: must be a whole number, at least 1")
        if self.engine not in ("oscar", "vllm"):
            raise InputError(f"engine={self.engine!r}: must be oscar or vllm")
        if self.server is not None and self.engine != "oscar":
            raise InputError(
                f"server with engine {self.engine}: a server has its own engine; leave engine out"
            )

    def changed(self, names: Iterable[str]) -> list[str]:
        """Return those of the given field names whose values differ from the defaults."""
        usual = {one.name: one.default for one in fields(self)}
        return [name for name in names if getattr(self, name) != usual[name]]
