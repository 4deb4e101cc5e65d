"""The kernels compile for every architecture, in the shape they run in there. No GPU is needed."""

from collections.abc import Callable
from dataclasses import asdict
from itertools import product

import pytest
import torch

from oscar_mm import KVPolicy
from oscar_mm.kernels.compile import Report, csrc_folder
from oscar_mm.ops.decode import Params, Specialization
from oscar_mm.ops.decode_tables import FIELDS
from oscar_mm.pages.layout import PageFormat
from tests.compiled import architectures, compile_once, same_struct
from tests.ops.arguments import channel_policy, stream_policy

pytest.importorskip("cuda.core", reason="needs cuda-core")

SHARED_LIMITS = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_89": 99,
    "sm_90a": 227,
    "sm_100a": 227,
    "sm_120": 99,
}
"""KiB of shared memory that a thread block may have."""
TMA = {"sm_90a", "sm_100a", "sm_120"}
COLUMNS = (4, 8)
"""Queries of a KV head: half of a fragment's columns, or all."""
STREAM_BITS = ((2, 2), (3, 2), (4, 2), (3, 3), (4, 4), (2, 4))
POLICIES = {
    "channel": channel_policy(),
    "oscar": KVPolicy.preset("oscar"),
    "kivi": KVPolicy.preset("kivi"),
    "bf16": KVPolicy.preset("bf16"),
    "4 bit": channel_policy(bits=4),
    "mixed": channel_policy(bits={"text": 4, "image": 2}),
    "groups of 64": channel_policy(key_group=64, value_group=64),
    "quarot": KVPolicy.preset("quarot"),
    **{f"stream {k}/{v}": stream_policy((k, v)) for k, v in STREAM_BITS},
    "stream 2/2 and 4/2": stream_policy({"text": (4, 2), "image": (2, 2)}),
    "stream 3/3 and 4/4": stream_policy({"text": 4, "image": 3, "video": 3, "audio": 3}),
    "stream, groups of 32": stream_policy(value_group=32),
}
DEFAULTS = ("channel", "stream 3/2")
ARCH = "sm_90a"
"""For every specialization, those of the defaults among them."""
OTHERS = architectures(arch for arch in SHARED_LIMITS if arch != ARCH)
USUAL = (*DEFAULTS, "oscar", "quarot", "mixed", "stream 2/2", "stream 4/2", "stream 2/2 and 4/2")


def is_usual(name: str, head_dim: int, columns: int) -> bool:
    """Whether it is compiled every day: the defaults, and of others what takes more registers."""
    if head_dim >= 256:
        return name == "stream 3/2"
    return head_dim == 128 and name in (USUAL if columns == max(COLUMNS) else DEFAULTS)


def fits(name: str, head_dim: int) -> bool:
    """Whether there is a kernel."""
    policy = POLICIES[name]
    by_token = policy.key_axis == "token" and head_dim <= 4 * policy.value_group
    return head_dim <= 128 or not policy.packs or by_token


EVERY = [
    pytest.param(*one, marks=() if is_usual(*one) else pytest.mark.soak)
    for one in product(POLICIES, (64, 128, 256, 512), COLUMNS)
    if fits(*one[:2])
]
"""The usual ones every day; the tests on a GPU compile the others too."""


def specialization(policy: KVPolicy, head_dim: int, columns: int = 4) -> Specialization:
    formats = [PageFormat.of(policy, bits, 8, head_dim) for bits in policy.packed_bits]
    found = Specialization.of(formats, head_dim, policy.rotate, torch.bfloat16, columns)
    assert isinstance(found, Specialization)
    return found


@pytest.fixture
def compiled(record_property: Callable[[str, object], None]) -> Callable[..., Report | None]:
    """Compile decode.cu for a policy, check the host's picture of it, record what it takes."""

    def compile_decode(arch: str, policy: KVPolicy, head_dim: int, columns: int) -> Report | None:
        made = specialization(policy, head_dim, columns)
        limit = SHARED_LIMITS[arch] * 1024
        shape = made.shape(limit)
        if shape is None:
            return None
        assert made.launch_bytes(shape) <= limit
        size = made.shared_bytes(shape.warps, shape.buffers)
        # The host computes these sizes on its own: the twins must agree.
        text = (csrc_folder() / "decode/decode.cu").read_text() + (
            f"static_assert(sizeof(Shared) <= {size} && sizeof(Shared) > {size - 128});\n"
            f"{same_struct(Params)}"
            f"static_assert(sizeof(Work) == 4 * {FIELDS});\n"
            "static_assert(sizeof(Work) == 2 * sizeof(Assignment));\n"
        )
        macros = made.macros(shape._replace(by_warps=0), arch in TMA)
        report = compile_once("decode/decode.cu", text, arch, macros)["decode"]
        if shape.by_warps:
            # Where it has no warps with segments of their own, the kernel must not spill either.
            assert report.spill_stores == report.spill_loads == report.stack == 0
            text += f"static_assert(sizeof(by_warps::Own) == {made.warp_bytes});\n"
            macros = made.macros(shape, arch in TMA)
            report = compile_once("decode/decode.cu", text, arch, macros)["decode"]
        print(arch, head_dim, columns, shape, report)
        for name, value in asdict(report).items():
            record_property(name, value)
        assert report.shared == 0, "decode takes its shared memory at launch"
        return report

    return compile_decode


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("arch", OTHERS)
def test_defaults_on_every_other_architecture(
    compiled: Callable[..., Report | None], arch: str, name: str, columns: int
) -> None:
    report = compiled(arch, POLICIES[name], 128, columns)
    assert report is not None
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("arch", OTHERS)
def test_larger_heads_on_every_other_architecture(
    compiled: Callable[..., Report | None], arch: str, columns: int
) -> None:
    report = compiled(arch, POLICIES["stream 3/2"], 256, columns)
    assert report is not None
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)


@pytest.mark.parametrize(("name", "head_dim", "columns"), EVERY)
def test_every_specialization(
    compiled: Callable[..., Report | None], name: str, head_dim: int, columns: int
) -> None:
    report = compiled(ARCH, POLICIES[name], head_dim, columns)
    assert report is not None
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)


@pytest.mark.parametrize(
    ("policy", "buffers"), [(POLICIES["stream 3/2"], 7), (POLICIES["4 bit"], 4)]
)
def test_small_gpus_have_fewer_buffers_than_warps(
    compiled: Callable[..., Report | None], policy: KVPolicy, buffers: int
) -> None:
    limit = SHARED_LIMITS["sm_89"] * 1024
    shape = specialization(policy, 128).shape(limit)
    assert shape is not None and shape[:2] == (8, buffers)
    report = compiled("sm_89", policy, 128, 4)
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)


def test_pages_too_large_for_a_small_gpu() -> None:
    large = specialization(channel_policy(bits=4, key_group=32, value_group=32), 128, columns=8)
    assert large.shape(SHARED_LIMITS["sm_89"] * 1024) is None
    assert large.shape(SHARED_LIMITS["sm_80"] * 1024) is not None
