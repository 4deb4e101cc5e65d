"""`oscar-mm doctor`: show versions and devices, and check packing, video and kernels."""

import importlib.metadata
import json
import math
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import oscar_mm
from oscar_mm.apps import terminal
from oscar_mm.extras import DISTRIBUTION, install_command
from oscar_mm.policy import KVPolicy

if TYPE_CHECKING:
    import torch

DEVELOPER_EXTRAS = ("test", "dev", "docs")

# Maximum relative error |x^ - x| / |x| of Gaussian keys and values, by bits per code. The range of
# 128 Gaussian numbers is about 5.5 sigma, so the error with 2^bits levels is 0.53 (2 bits) and 0.11
# (4 bits); bfloat16 rounds to 2^-9. The bounds are 25% higher than these errors.
ERROR_BOUND = {2: 0.66, 3: 0.3, 4: 0.14, 16: 0.003}
# Bits per value in addition to the codes: scales and zeros (32 bits per group of 32 values), and
# norms (16 bits per key).
OVERHEAD_BOUND = 1.2
BY_TORCH = "PyTorch operations over packed pages"
BY_CPU_KERNELS = "CPU kernels (numba) over packed pages"
BY_KERNEL = "CUDA kernels over packed pages"
NO_KERNELS = (
    "no CUDA kernels run here; on an NVIDIA GPU with compute capability 8.0 or newer, the kernels "
    "of pages (append, decode, pack, unpack) and of decode steps (delta, linear, mixture, rope) "
    "are compared with PyTorch operations and timed"
)
SHAPE = (1, 4, 512, 128)
CLIP_FRAMES = 8
CLIP_FPS = 4


@dataclass(frozen=True)
class Check:
    """Result of a check: its name, whether it passed, and what it measured."""

    name: str
    ok: bool
    detail: str


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME|DIR|ID",
            help="Also say what runs the decode steps of this model; its weights are not read.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.")
    ] = False,
) -> None:
    """Show versions and devices, and run checks; the exit code is 1 if a check fails."""
    path = None if model is None else _decode_path(model)
    devices = _devices()
    checks = [_video_check()]
    for device in devices:
        checks += [_roundtrip_check(name, device["name"]) for name in KVPolicy.preset_names()]
        if device["attention"] == BY_CPU_KERNELS:
            checks += _loop_checks()
        if device["attention"] == BY_KERNEL:
            checks += _kernel_checks(device["name"])
    healthy = all(check.ok for check in checks)
    report = {
        "versions": _versions(),
        "devices": devices,
        "extras": missing_by_extra(),
        "model": path,
        "checks": [asdict(check) for check in checks],
        "ok": healthy,
    }
    print(json.dumps(report) if as_json else _format_report(report), flush=True)
    if not healthy:
        raise typer.Exit(1)


def _decode_path(model: str) -> dict[str, Any]:
    """Return what runs a model's decode steps, with its name."""
    terminal.quiet_transformers()
    from oscar_mm.pipelines.decode_path import decode_path

    path = decode_path(model)
    return {"name": model} | asdict(path) | {"steps": path.steps}


def _versions() -> dict[str, str]:
    import torch
    import transformers

    return {
        "oscar-mm": oscar_mm.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda or "none in this torch",
        "driver": _driver(),
    }


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "none found"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed ({error})"
    return answer.stdout.split("\n", 1)[0].strip() or "none found"


def _devices() -> list[dict[str, Any]]:
    import psutil
    import torch

    from oscar_mm.kernels.launch import architecture, kernels_disabled, numba_failure

    memory = psutil.virtual_memory()
    devices = [
        {
            "name": "cpu",
            "model": platform.processor() or platform.machine(),
            "total_bytes": memory.total,
            "free_bytes": memory.available,
            "attention": BY_TORCH if kernels_disabled() or numba_failure() else BY_CPU_KERNELS,
        }
    ]
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        by_kernel = architecture(torch.device("cuda", index)) and not kernels_disabled()
        devices.append(
            {
                "name": f"cuda:{index}",
                "model": torch.cuda.get_device_name(index),
                "total_bytes": total,
                "free_bytes": free,
                "attention": BY_KERNEL if by_kernel else BY_TORCH,
            }
        )
    return devices


def missing_by_extra() -> dict[str, list[str]] | None:
    """Return the missing packages of each extra; None if this package is not installed."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    missing: dict[str, list[str]] = {}
    for requirement in requirements:
        parts = re.match(r"([A-Za-z0-9._-]+).*extra == ['\"]([\w-]+)['\"]", requirement)
        if parts is None or parts[2] in DEVELOPER_EXTRAS:
            continue
        absent = missing.setdefault(parts[2], [])
        try:
            importlib.metadata.version(parts[1])
        except importlib.metadata.PackageNotFoundError:
            absent.append(parts[1])
    return missing


def _run_check(name: str, trial: Callable[[], tuple[bool, str]]) -> Check:
    """Run a check and return its result; an exception counts as a failure."""
    try:
        return Check(name, *trial())
    except Exception as error:
        return Check(name, False, f"{type(error).__name__}: {error}")


def _video_check() -> Check:
    def trial() -> tuple[bool, str]:
        from oscar_mm.media import load_video

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "doctor.mp4"
            codec = _write_clip(path)
            frames = load_video(path, fps=CLIP_FPS).frames
        brightness = frames.mean(axis=(1, 2, 3))
        is_right = len(frames) == CLIP_FRAMES and bool((brightness[1:] > brightness[:-1]).all())
        return is_right, f"{codec} in mp4, {len(frames)} of {CLIP_FRAMES} frames read in order"

    return _run_check("video decoder", trial)


def _write_clip(path: Path) -> str:
    """Write a video whose frames get brighter one by one; return the name of its codec."""
    import av
    import numpy as np

    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=CLIP_FPS)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for index in range(CLIP_FRAMES):
            picture = np.full((64, 64, 3), index * 255 // CLIP_FRAMES, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
        container.mux(stream.encode())
    return codec


def _roundtrip_check(preset: str, device: str) -> Check:
    def trial() -> tuple[bool, str]:
        import torch

        from oscar_mm.inspect.quantization_errors import roundtrip

        generator = torch.Generator().manual_seed(0)
        keys, values = (
            torch.randn(SHAPE, generator=generator).to(device, torch.bfloat16) for _ in range(2)
        )
        policy = KVPolicy.preset(preset)
        result = roundtrip(keys, values, policy)
        errors = _relative_error(result.k, keys), _relative_error(result.v, values)
        bits, widths = result.bits_per_value, policy.bits.text
        low, bounds = sum(widths) / 2, [ERROR_BOUND[width] for width in widths]
        is_right = all(
            math.isfinite(error) and error <= bound
            for error, bound in zip(errors, bounds, strict=True)
        )
        is_right = is_right and low <= bits <= low + OVERHEAD_BOUND
        detail = (
            f"{bits:.2f} bits per value, relative error {errors[0]:.3f} (keys, at most "
            f"{bounds[0]}) {errors[1]:.3f} (values, at most {bounds[1]})"
        )
        return is_right, detail

    return _run_check(f"roundtrip {preset} on {device}", trial)


def _loop_checks() -> list[Check]:
    """Compare CPU kernels with PyTorch operations."""
    from oscar_mm.apps.operation_checks import check_all_loops

    return [
        Check(
            f"CPU kernel, {name}",
            verdict.agrees,
            f"error against PyTorch {verdict.disagreement:.1e}, limit {verdict.bound:g}",
        )
        for name, verdict in check_all_loops().items()
    ]


def _kernel_checks(device: str) -> list[Check]:
    """Compare results of GPU kernels with PyTorch operations, and their speed with a plain copy."""
    import torch

    from oscar_mm.apps import operation_checks

    place = torch.device(device)
    speeds: list[float] = []

    def copy() -> tuple[bool, str]:
        speeds.append(operation_checks.copy_speed(place))
        return True, f"{speeds[0] / 1e9:.0f} GB/s read and written"

    def kernel(operation: str) -> tuple[bool, str]:
        verdict = operation_checks.check_kernel(operation, place)
        distance = f"error {verdict.disagreement:.2g}, limit {verdict.bound:g}"
        if not verdict.agrees:
            return False, f"disagrees with PyTorch operations ({distance}): it is not used"
        workload = operation_checks.workload(operation, place)
        seconds = operation_checks.call_seconds(workload.call, place)
        speed = workload.moved_bytes / seconds
        share = "".join(f", {speed / copied:.0%} of a copy" for copied in speeds)
        timed = f"{seconds * 1e6:.1f} us, {speed / 1e9:.0f} GB/s{share}"
        return True, f"agrees with PyTorch operations ({distance}), {timed}"

    return [
        _run_check(f"copy on {device}", copy),
        *(
            _run_check(f"{name} kernel on {device}", partial(kernel, name))
            for name in operation_checks.KERNELS
        ),
    ]


def _relative_error(actual: "torch.Tensor", expected: "torch.Tensor") -> float:
    actual, expected = actual.float(), expected.float()
    return float((actual - expected).norm() / expected.norm())


def _format_report(report: dict[str, Any]) -> str:
    lines = ["versions"]
    lines += [f"  {name:<13} {version}" for name, version in report["versions"].items()]
    lines.append("devices")
    for device in report["devices"]:
        free, total = (device[key] / 2**30 for key in ("free_bytes", "total_bytes"))
        lines.append(
            f"  {device['name']:<13} {device['model']}, {free:.1f} of {total:.1f} GiB free"
        )
        lines.append(f"  {'':<13} attention: {device['attention']}")
    lines.append("extras")
    if report["extras"] is None:
        lines.append(f"  unknown: {DISTRIBUTION} is not installed, this is a bare checkout")
    for extra, missing in (report["extras"] or {}).items():
        if missing:
            state = f"missing {', '.join(missing)}: run {install_command(extra)}"
        else:
            state = "present"
        lines.append(f"  {extra:<13} {state}")
    if (path := report["model"]) is not None:
        lines.append(f"model {path['name']}")
        lines += [f"  {name:<13} {path[name]}" for name in ("family", "weights")]
        lines.append(f"  {'decode steps':<13} {path['steps']} on a GPU")
    if all(device["attention"] != BY_KERNEL for device in report["devices"]):
        lines.append("kernels")
        lines.append(f"  {NO_KERNELS}")
    lines.append("checks")
    for check in report["checks"]:
        lines.append(f"  {'ok' if check['ok'] else 'FAILED':<7} {check['name']}: {check['detail']}")
    return "\n".join(lines)
