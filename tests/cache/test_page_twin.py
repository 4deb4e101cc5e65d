"""csrc/page.cuh states the bytes of a page as cache/layout.py does."""

import re
from itertools import product

import pytest

from oscar_mm.cache.layout import BLOCK_TOKENS, PAGE_TOKENS, PageFormat
from oscar_mm.ops.nvrtc import KernelError, compile_text, csrc_folder

pytest.importorskip("cuda.core", reason="needs cuda-core")

KV_HEADS = 8
SCALINGS = (None, "per_head", "shared")  # at the index that page.cuh's SCALING has
MACROS = ("HEAD_DIM", "KEY_GROUP", "VALUE_GROUP", "SCALING")
FORMATS = [
    PageFormat(bits, KV_HEADS, head_dim, "channel", key_group, value_group, scaling)
    for head_dim, key_group, value_group, scaling, bits in product(
        (64, 128), (32, 64, 128), (32, 64, 128), SCALINGS, (2, 4)
    )
    if value_group <= head_dim
]


def page_header() -> tuple[str, str]:
    """Lines of page.cuh that include other headers, and the rest of it."""
    text = (csrc_folder() / "page.cuh").read_text().replace("#pragma once", "")
    includes = re.findall(r"^#include .*$", text, re.MULTILINE)
    return "\n".join(includes), re.sub(r"^#include .*$", "", text, flags=re.MULTILINE)


def claims(page: PageFormat, page_bytes: int) -> list[str]:
    """What layout.py says, as page.cuh would say it."""
    twin = f"Page<{page.bits}>"
    found = {
        f"{twin}::{name}": field.offset for name, field in page.fields.items() if field.per_head
    }
    found[f"{twin}::head_bytes"] = page.head_bytes
    found[f"{twin}::page_bytes({page.kv_heads})"] = page_bytes
    found[f"{twin}::CODES"] = page.fields["key_codes"].nbytes
    found["KEY_GROUPS"] = page.fields["key_scales"].shape[0]
    found["VALUE_GROUPS"] = page.fields["value_scales"].shape[0]
    found["PAGE_TOKENS"], found["BLOCK_TOKENS"] = PAGE_TOKENS, BLOCK_TOKENS
    if page.token_scaling == "shared":
        # Without a name there: the shared norms begin where the heads end.
        norms = page.fields["norms"]
        found[f"{page.kv_heads} * {twin}::head_bytes"] = norms.offset
        found[f"{twin}::shared_bytes"] = norms.nbytes
    else:
        found[f"{twin}::shared_bytes"] = 0
    return [f'static_assert({name} == {value}, "{page}");' for name, value in found.items()]


def source(formats: list[PageFormat], more: int = 0) -> str:
    """page.cuh once per format, each in a namespace, so that one compilation checks all."""
    includes, header = page_header()
    parts = [includes]
    for index, page in enumerate(formats):
        scaling = SCALINGS.index(page.token_scaling)
        values = (page.head_dim, page.key_group, page.value_group, scaling)
        for macro, value in zip(MACROS, values, strict=True):
            parts += [f"#undef {macro}", f"#define {macro} {value}"]
        parts += [f"namespace format{index} {{", header, *claims(page, page.page_bytes + more), "}"]
    return "\n".join(parts)


def test_page_twin() -> None:
    assert len(FORMATS) == 90
    compile_text("page_twin.cu", source(FORMATS), "sm_80", {})


def test_a_difference_is_found() -> None:
    with pytest.raises(KernelError, match=r"static assertion failed.*PageFormat\(bits=4"):
        compile_text("page_twin.cu", source(FORMATS[1:2], more=16), "sm_80", {})
