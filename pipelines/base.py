"""Family: what differs between families of models: prompt, processor call and positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from PIL import Image

from oscar_mm.decoding import Prompt
from oscar_mm.errors import InputError
from oscar_mm.media import Video


class Family(ABC):
    """One family of models. No cache logic here: a ``Prompt`` is all that decoding needs.

    Args:
        model: a loaded model of the family.
        processor: its processor.
    """

    model_types: ClassVar[tuple[str, ...]]
    """``config.model_type`` of the checkpoints that the family reads."""

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor = model, processor

    @property
    def device(self) -> torch.device:
        """Where the prompt goes."""
        return self.model.get_input_embeddings().weight.device

    @abstractmethod
    def messages(
        self, prompt: str, system: str | None, images: int, videos: int
    ) -> list[dict[str, Any]]:
        """The conversation for the chat template."""

    @abstractmethod
    def prompt(
        self,
        messages: Sequence[dict[str, Any]],
        images: Sequence[Image.Image],
        videos: Sequence[Video],
    ) -> Prompt:
        """Run template and processor; tensors on the model's device, positions computed."""

    def end_tokens(self) -> frozenset[int]:
        """Token ids that end an answer."""
        ids = self.model.generation_config.eos_token_id
        if ids is None:
            ids = self.processor.tokenizer.eos_token_id
        return frozenset([ids] if isinstance(ids, int) else ids or [])

    def refuse_control_tokens(self, name: str, text: str) -> None:
        """Text from a user must not end its own turn or claim to be an image."""
        for token in self.processor.tokenizer.all_special_tokens:
            if token in text:
                raise InputError(
                    f"{name} holds {token!r}, a control token of this model: take it out"
                )
