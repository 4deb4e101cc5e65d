"""What vLLM makes of the arguments of `oscar-mm serve --engine vllm`."""

import json

import pytest

pytest.importorskip("vllm")

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from oscar_mm.apps.serve.vllm_server import vllm_arguments
from tests.vllm_plugin.vllm_engine import NEWER

pytestmark = pytest.mark.usefixtures("gpu_like")
OF_SERVERS = {"--host", "--port", "--allowed-origins", "--served-model-name"}


def read_by_vllm(*passed: str) -> AsyncEngineArgs:
    arguments = vllm_arguments("pocket-vl", "standard", "127.0.0.1", 8000, {}, passed)
    pairs = list(zip(arguments[::2], arguments[1::2], strict=True))
    words = [word for pair in pairs if pair[0] not in OF_SERVERS for word in pair]
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args(words))


def test_attention_of_layers() -> None:
    found = read_by_vllm()
    assert found.attention_backend == AttentionBackendEnum.CUSTOM.name
    kinds = getattr(found.attention_config, "backend_per_kind", {})
    assert kinds == ({"sliding_window": AttentionBackendEnum.FLASH_ATTN} if NEWER else {})


@pytest.mark.parametrize(
    "passed",
    [
        ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 2})],
        ["--speculative-config.method", "mtp", "--speculative-config.num_speculative_tokens", "2"],
    ],
)
def test_attention_of_drafts(passed: list[str]) -> None:
    drafts = {"method": "mtp", "num_speculative_tokens": 2, "attention_backend": "CUSTOM"}
    assert read_by_vllm(*passed).speculative_config == drafts
    others = ["--speculative-config.attention_backend", "auto"]
    if "." in passed[0]:
        found = read_by_vllm(*passed, *others).speculative_config
        assert found == drafts | {"attention_backend": "auto"}
