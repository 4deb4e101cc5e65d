"""Adapters that are switched under a pipeline: nothing that one has read is taken for another's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText

from oscar_mm import InputError, OscarVLPipeline
from oscar_mm.pipelines.shared_media import SharedMedia
from tests.adapters import PLACES, RANKS, OwnAdapters
from tests.pipelines.conftest import NEVER
from tests.prompts import noise

PICTURE = noise(200, 220)


class Adapters(Protocol):
    """Two adapters of a model, of different ranks."""

    def use(self, *names: str) -> None:
        """Make these the ones that act; none for the model alone."""
        ...

    def scale(self, name: str, factor: float) -> None: ...

    def remove(self, name: str) -> None: ...


class PeftAdapters:
    def __init__(self, model: nn.Module) -> None:
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        first, second = (
            peft.LoraConfig(
                r=rank, lora_alpha=4 * rank, target_modules=list(PLACES), init_lora_weights=False
            )
            for rank in RANKS.values()
        )
        self.model = peft.get_peft_model(model, first, adapter_name="a").eval()
        self.model.add_adapter("b", second)

    def use(self, *names: str) -> None:
        if not names:
            self.model.base_model.disable_adapter_layers()
            return
        self.model.base_model.enable_adapter_layers()
        self.model.base_model.set_adapter(list(names))

    def scale(self, name: str, factor: float) -> None:
        for module in self.model.modules():
            if hasattr(module, "set_scale"):
                module.set_scale(name, factor)

    def remove(self, name: str) -> None:
        self.model.delete_adapter(name)


class Adapted:
    """A model with adapters, in a pipeline that keeps prefixes and in one that does not."""

    def __init__(self, folder: Path, kind: type) -> None:
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.adapters: Adapters = kind(model)
        model.generation_config.eos_token_id = NEVER
        self.pipe = OscarVLPipeline(model, policy="bf16", prefix_cache="100MB", kv_budget="100MB")
        self.plain = OscarVLPipeline(model, policy="bf16")

    def answers(self) -> tuple[list[int], list[int]]:
        """Return the answers of the two pipelines."""
        found, expected = (
            pipe([PICTURE], "What is it?", max_new_tokens=6).token_ids
            for pipe in (self.pipe, self.plain)
        )
        return found, expected


KINDS = {"protocol": OwnAdapters, "peft": PeftAdapters}


@pytest.fixture(params=KINDS)
def adapted(request, qwen3_vl_folder) -> Iterator[Adapted]:
    yield Adapted(qwen3_vl_folder, KINDS[request.param])


@pytest.mark.daily("peft")
def test_no_prefix_of_another_adapter(adapted) -> None:
    adapters, seen = adapted.adapters, {}

    def check(name: str, hits: int) -> None:
        before = adapted.pipe.prefixes.hits
        found, expected = adapted.answers()
        assert found == expected, name
        assert adapted.pipe.prefixes.hits - before == hits, name
        seen[name] = found

    for names in ((), ("a",), ("b",), ("a", "b")):
        adapters.use(*names)
        check(" ".join(names), 0)
    for names in (("a",), ()):  # What was read with the same ones is known.
        adapters.use(*names)
        check(" ".join(names), 1)
    adapters.use("a")
    adapters.scale("a", 0)
    check("a scaled", 0)
    assert seen["a scaled"] == seen[""]
    assert len({str(one) for one in seen.values()}) >= 4
    adapters.use("b")
    adapters.remove("a")
    check("b alone", 0)
    assert seen["b alone"] == seen["b"]


@pytest.mark.daily("protocol")
def test_no_prefix_of_weights_before_they_changed(adapted) -> None:
    adapted.adapters.use("a")
    adapted.answers()
    model = adapted.pipe.model
    with torch.no_grad():
        for weight in model.get_decoder().parameters():
            weight.mul_(1.2)
    found, expected = adapted.answers()
    assert found == expected and adapted.pipe.prefixes.hits == 0
    model.load_state_dict({name: 0.9 * x for name, x in model.state_dict().items()})
    found, expected = adapted.answers()
    assert found == expected and adapted.pipe.prefixes.hits == 0


def test_shared_media_are_of_one_adapter(adapted) -> None:
    adapted.adapters.use("a")
    media = SharedMedia(adapted.pipe, adapted.pipe.read_media([PICTURE]))
    media.question("What is it?", ["A dog", "A sign"])
    adapted.adapters.use("b")
    with pytest.raises(InputError, match=r"adapters have changed.*create a new SharedMedia"):
        media.question("What is it?", ["A dog", "A sign"])
    adapted.adapters.use("a")
    media.question("What is it?", ["A dog", "A sign"])
    media.close()


def test_a_saved_chat_belongs_to_its_adapters(adapted, tmp_path: Path) -> None:
    adapters, pipe, path = adapted.adapters, adapted.pipe, tmp_path / "chat"
    adapters.use("a")
    chat = pipe.chat()
    chat.ask("What is it?", images=[PICTURE], max_new_tokens=4)
    chat.save(path)
    expected = chat.fork().ask("And why?", max_new_tokens=4).token_ids

    def is_refused() -> bool:
        with pytest.raises(InputError, match="another model"):
            pipe.load_chat(path)
        return True

    adapters.use("b")
    assert is_refused()
    adapters.use()
    assert is_refused()
    adapters.use("a", "b")
    assert is_refused()
    adapters.use("a")
    adapters.scale("a", 0.5)
    assert is_refused()
    adapters.scale("a", 1)
    adapters.remove("b")
    assert pipe.load_chat(path).ask("And why?", max_new_tokens=4).token_ids == expected


def test_without_adapters_that_act_it_is_the_checkpoint(adapted, qwen3_vl_folder) -> None:
    alone = OscarVLPipeline(qwen3_vl_folder, device="cpu").fingerprint
    adapted.adapters.use()
    assert adapted.pipe.fingerprint == alone
    adapted.adapters.use("a")
    assert adapted.pipe.fingerprint != alone


def test_merged_adapters_are_other_weights(qwen3_vl_folder) -> None:
    adapted = Adapted(qwen3_vl_folder, PeftAdapters)
    adapted.adapters.use("a")
    before, fingerprint = adapted.answers()[0], adapted.pipe.fingerprint
    adapted.adapters.model.merge_adapter()
    found, expected = adapted.answers()
    assert found == expected == before and adapted.pipe.prefixes.hits == 0
    assert adapted.pipe.fingerprint != fingerprint


def test_a_chat_in_memory_goes_on_under_another_adapter(adapted) -> None:
    """Over the keys and values that it has, on disk or not."""
    adapted.adapters.use("a")
    chat = adapted.pipe.chat()
    chat.ask("What is it?", images=[PICTURE], max_new_tokens=4)
    twin = chat.fork()
    adapted.adapters.use("b")
    twin._spillable.spill(adapted.pipe.budget.new_file())
    found = [one.ask("And why?", max_new_tokens=4).token_ids for one in (chat, twin)]
    assert found[0] == found[1]


def test_files_that_were_saved_before_adapters_counted() -> None:
    pipe = OscarVLPipeline("pocket-vl", device="cpu", dtype="float32")
    digest = "2c5481f1685299586c811c72883492a19cfc1170b124d1ebbf42053bc61b8733"
    assert pipe.fingerprint == f"qwen3_vl float32 {digest}"
