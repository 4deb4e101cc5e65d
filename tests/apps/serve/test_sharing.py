"""What clients of one server share, and what none learns of another."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from oscar_mm import OscarOmniPipeline
from oscar_mm.pages.layout import PAGE_TOKENS
from tests.apps.serve.conftest import image, openai, png, served, sound, text, user, wav
from tests.engine.test_prefix_cache import tokens_read
from tests.pipelines.conftest import NEVER

SYSTEM = {"role": "system", "content": "You are the assistant of a bank, brief and polite. " * 7}
SECRET = "4815"
LONG = "Tell me about this house, and of who lived here. " * 20
SHOWN = user(image(png()), sound(wav()), text("What is it?"))


@pytest.fixture(scope="module")
def pipe(qwen3_omni_folder) -> OscarOmniPipeline:
    made = OscarOmniPipeline(qwen3_omni_folder, policy="compact", device="cpu", prefix_cache="99MB")
    made.model.generation_config.eos_token_id = NEVER
    return made


@pytest.fixture(scope="module")
def client(pipe) -> Iterator[Any]:
    with (
        served(pipe) as where,
        openai.OpenAI(base_url=f"{where}/v1", api_key="any", max_retries=0) as made,
    ):
        yield made


@pytest.fixture
def usage(pipe, client) -> Callable[..., Any]:
    """Asks for one token, of a server without known beginnings, and returns the usage."""
    pipe.prefixes.clear()

    def asked(*messages: dict[str, Any], salt: str | None = None) -> Any:
        more = {} if salt is None else {"cache_salt": salt}
        return client.chat.completions.create(
            model="tiny", messages=list(messages), max_tokens=1, extra_body=more
        ).usage

    return asked


def cached(usage: Any) -> int:
    return usage.prompt_tokens_details.cached_tokens


@pytest.mark.slow
def test_a_number_is_not_read_out_digit_by_digit(pipe, usage) -> None:
    """To who asks next, every digit after a right beginning looks the same."""
    prompt = "My code is "
    usage(SYSTEM, user(prompt + SECRET))
    for known in range(len(SECRET)):
        signals = set()
        for digit in "0123456789":
            with tokens_read(pipe) as read:  # This takes the time that a client may measure.
                found = usage(SYSTEM, user(prompt + SECRET[:known] + digit))
            signals.add((cached(found), found.kv_bytes, str(found.kv_bytes_by_modality), *read))
        assert len(signals) == 1
        assert signals.pop()[0] >= PAGE_TOKENS, "the known system prompt is shared"


def test_beginnings_end_with_pages_and_media(pipe, usage) -> None:
    usage(SYSTEM, SHOWN)
    saved = pipe.prefixes.tokens_saved
    for question in ("What is it?", "Who is it?"):
        with tokens_read(pipe) as read:
            again = usage(SYSTEM, user(image(png()), sound(wav()), text(question)))
        assert read[0] < 30, "the question alone"
        assert 0 < cached(again) == (again.prompt_tokens - read[0]) // PAGE_TOKENS * PAGE_TOKENS
    assert pipe.prefixes.tokens_saved - saved > 2 * PAGE_TOKENS
    other = usage(SYSTEM, user(image(png(1)), sound(wav()), text("What is it?")))
    assert cached(other) == cached(usage(SYSTEM, user("Hello"))) == PAGE_TOKENS


@pytest.mark.daily("mine")
@pytest.mark.parametrize("mine", ["mine", None])
def test_salts_share_nothing(pipe, usage, mine: str | None) -> None:
    past = [SYSTEM, SHOWN, {"role": "assistant", "content": ""}]
    for messages in (past[:2], [SYSTEM, user(LONG)]):
        usage(*messages, salt=mine)
        assert cached(usage(*messages, salt=mine)) >= PAGE_TOKENS
    for number, messages in enumerate((past[:2], [SYSTEM, user(LONG)])):
        for other in ("yours", "Mine", "0" * 256):
            assert cached(usage(*messages, salt=f"{number}{other}"[:256])) == 0
    # A kept conversation is its client's too.
    with pipe.chat(SYSTEM["content"]) as chat:
        said = chat.ask("What is it?", images=[png()], audio=[wav()], max_new_tokens=1).text
    past[2]["content"] = said
    assert cached(usage(*past, user("And now?"), salt="nobody's")) == 0
    assert cached(usage(*past, user("And now?"), salt=mine)) >= PAGE_TOKENS
