"""Chats of tiny models, and what to ask them."""

from pathlib import Path
from typing import Any

from oscar_mm import OscarVLPipeline
from oscar_mm.chat.chat import Chat
from tests.pipelines.conftest import NEVER
from tests.prompts import noise

QUESTION = {"prompt": "What is it?", "images": [noise(64, 96)], "max_new_tokens": 6}
OTHER = {"prompt": "And this one?", "images": [noise(100, 120, 1)], "max_new_tokens": 6}
MORE = {"prompt": "Is there more?", "max_new_tokens": 6}


def packed_pipeline(folder: Path) -> OscarVLPipeline:
    """Over packed pages; answers have all their tokens."""
    pipe = OscarVLPipeline(folder, policy="channel", device="cpu")
    pipe.model.generation_config.eos_token_id = NEVER
    return pipe


def asked(chat: Chat, *questions: dict[str, Any]) -> list[list[int]]:
    return [chat.ask(**question).token_ids for question in questions]
