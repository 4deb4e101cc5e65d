"""Adapters that each request chooses: its row answers like PEFT's modules with that adapter."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oscar_mm import InputError, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.engine import decode_runner
from oscar_mm.engine.message import first_turn
from oscar_mm.fast_decode import graph_runner
from oscar_mm.fast_decode.graph_runner import GraphRunner
from oscar_mm.fast_decode.low_rank import LowRank
from oscar_mm.fast_decode.row_adapters import AdaptedLinear, RowAdapters, choosing
from oscar_mm.media.part import media_parts
from oscar_mm.pipelines.row_adapters import MAX_ADAPTERS
from oscar_mm.policy import PLAIN
from tests.lora import PeftReference, base_model, save_adapter, saved_adapters
from tests.prompts import REQUESTS

peft = pytest.importorskip("peft")
COUNT = 12
ROWS = [
    *(("towers", "text"), (None, "text"), ("decoder", "text"), ("decoder", "two images")),
    *(("towers", "image"), (None, "image"), ("towers", "text")),
]
"""Adapter and request of each row of a batch."""


@pytest.fixture(scope="module")
def folders(qwen3_vl_folder, tmp_path_factory) -> dict[str, Path]:
    return saved_adapters(qwen3_vl_folder, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def expected(qwen3_vl_folder, folders) -> Callable[[str | None], list[Any]]:
    """What PEFT's modules answer to each row, with weights in a format."""
    known = dict[str | None, list[Any]]()

    def of(weights: str | None) -> list[Any]:
        if weights not in known:
            reference = PeftReference(qwen3_vl_folder, folders, weights)
            made = {row: reference.answer(row[0], REQUESTS[row[1]], COUNT) for row in set(ROWS)}
            known[weights] = [made[row] for row in ROWS]
        return known[weights]

    return of


def loaded(model: Any, **options: Any) -> OscarVLPipeline:
    how = {"device": "cpu", "policy": "bf16", "dtype": "float32"} | options
    pipe = OscarVLPipeline(model, **how)
    pipe.family.end_tokens = frozenset  # Answers have as many tokens as they are asked for.
    return pipe


@pytest.fixture(scope="module")
def pipe(qwen3_vl_folder, folders) -> OscarVLPipeline:
    return loaded(qwen3_vl_folder, adapters=folders)


def batch(pipe: OscarVLPipeline, batch_size: int = 32, fewer: int = 1) -> list[Any]:
    """The answers of all rows, which run together; some have fewer tokens, so that others join."""
    asked = [
        {
            "images": list(REQUESTS[name].images),
            "prompt": REQUESTS[name].prompt,
            "adapter": adapter,
            "max_new_tokens": COUNT - index % fewer,
            "temperature": 0,
            "logprobs": 0,
        }
        for index, (adapter, name) in enumerate(ROWS)
    ]
    results = pipe.batch(asked, batch_size=batch_size)
    assert [one.error for one in results] == [None] * len(ROWS)
    return [one.answer for one in results]


def check(answers: list[Any], expected: list[Any]) -> None:
    for row, answer, (tokens, logprobs) in zip(ROWS, answers, expected, strict=True):
        found = [one.logprob for one in answer.logprobs]
        assert answer.token_ids == tokens[: len(found)], row
        assert found == pytest.approx(logprobs[: len(found)], abs=0.02), row


def test_adapters_answer_differently(expected) -> None:
    by_row = dict(zip(ROWS, expected(None), strict=True))
    answers = [by_row[adapter, "text"][0] for adapter in (None, "towers", "decoder")]
    assert len(set(map(tuple, answers))) == 3


@pytest.mark.daily("llava_next", "qwen3_vl_moe")
@pytest.mark.parametrize("family", ["llava_next", "qwen2_5_vl", "qwen3_vl_moe"])
def test_other_families(family: str, request, tmp_path) -> None:
    checkpoint = request.getfixturevalue(f"{family}_folder")
    how = {"r": 4, "lora_alpha": 60, "target_modules": ["q_proj", "v_proj", "o_proj"]}
    folders = {"a": save_adapter(checkpoint, tmp_path / "a", **how)}
    reference, asked = PeftReference(checkpoint, folders, None), REQUESTS["image"]
    pipe = loaded(checkpoint, adapters=folders)
    made = [
        {"images": list(asked.images), "prompt": asked.prompt, "adapter": name, "temperature": 0}
        for name in ("a", None, "a")
    ]
    found = [one.answer for one in pipe.batch([one | {"max_new_tokens": COUNT} for one in made])]
    own, plain = (reference.answer(name, asked, COUNT)[0] for name in ("a", None))
    assert [one.token_ids for one in found] == [own, plain, own]
    assert own != plain


@pytest.mark.daily("None-True", "int4-True")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("weights", [None, "fp8", "int4"])
def test_rows_answer_like_peft(
    qwen3_vl_folder, folders, expected, weights, fused, device, monkeypatch
) -> None:
    # Convolutions of the towers, which a GPU computes in TF32 by default.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    if not fused:
        monkeypatch.setattr(graph_runner, "supports", lambda _: False)
    pipe = loaded(qwen3_vl_folder, adapters=folders, weights=weights, device=device)
    check(batch(pipe), expected(weights))
    if device == "cuda":  # Now graphs of prompts are replayed.
        check(batch(pipe), expected(weights))


def test_captured_steps_read_the_choice_where_it_was(
    qwen3_vl_folder, folders, expected, monkeypatch
) -> None:
    """A replay has the context of its capture, so that only tensors at their addresses matter."""
    counts = Counter[str]()

    def capture(function: Callable[[], Any], _: torch.device) -> Callable[[], Any]:
        counts["captures"] += 1
        context = copy_context()

        def replay() -> Any:
            counts["replays"] += 1
            return context.copy().run(function)

        return replay

    def steps(*arguments: Any) -> GraphRunner:
        return GraphRunner(*arguments, capture=capture)

    def grow() -> None:
        slots = pipe.store.allocators[PLAIN]
        slots.release(slots.allocate(2000))

    pipe = loaded(qwen3_vl_folder, adapters=folders)
    pipe(prompt="Hi", max_new_tokens=2)
    pipe.release_graphs()
    monkeypatch.setattr(decode_runner, "GraphRunner", steps)
    monkeypatch.setattr(pipe.store, "trim_surplus", lambda *_, **__: None)  # Graphs stay valid.
    pipe.engine.call(grow)
    check(batch(pipe, batch_size=4, fewer=5), expected(None))
    assert counts["captures"] <= 3, "fewer than there are changes of rows"
    assert counts["replays"] > 10


def test_prompts_with_different_adapters_share_a_pass(pipe, expected) -> None:
    """Text in one pass; pictures, whose rows in the tower are patches, with the same adapter."""
    asked = [
        pipe.read_request(
            first_turn(REQUESTS[name].prompt, media_parts(list(REQUESTS[name].images)), None),
            COUNT,
            adapter=adapter,
        )
        for adapter, name in ROWS
    ]

    def prefill() -> tuple[list[slice], list[int]]:
        caches = [pipe.new_cache() for _ in asked]
        passes = list(pipe.engine.reader.prefill_passes(asked, caches))
        return [some for some, _ in passes], torch.cat([x for _, x in passes]).argmax(-1).tolist()

    passes, tokens = pipe.engine.call(prefill, runs_model=True)
    assert passes == [slice(0, 3), slice(3, 4), slice(4, 5), slice(5, 6), slice(6, 7)]
    assert tokens == [row[0] for row, _ in expected(None)]


def test_prefixes_belong_to_an_adapter(qwen3_vl_folder, folders, expected) -> None:
    pipe = loaded(qwen3_vl_folder, adapters=folders, prefix_cache="1GB")
    image = REQUESTS["two images"]
    plain = {None: [], "towers": [], "decoder": []}
    for name, answers in plain.items():
        answers.append(image.ask(pipe, adapter=name, max_new_tokens=COUNT))
        assert answers[0].cached_tokens == 0, name
    for name, answers in plain.items():
        again = image.ask(pipe, adapter=name, max_new_tokens=COUNT)
        assert again.cached_tokens > 32
        assert again.token_ids == answers[0].token_ids
    assert len({tuple(answers[0].token_ids) for answers in plain.values()}) == 3


def test_chats_keep_their_adapter(qwen3_vl_folder, folders, pipe, tmp_path) -> None:
    def talk(adapter: str | None) -> tuple[Any, list[list[int]]]:
        chat = pipe.chat(adapter=adapter)
        chat.tell("Hello", "yes", images=list(REQUESTS["image"].images))
        return chat, [chat.ask("And now?", max_new_tokens=COUNT).token_ids for _ in range(2)]

    (chat, said), (_, other), (_, plain) = map(talk, ("decoder", "towers", None))
    assert said != other != plain != said
    chat.save(tmp_path / "chat")
    following = chat.fork().ask("Why?", max_new_tokens=COUNT).token_ids
    names = {"new name": folders["decoder"], "decoder": folders["towers"]}
    for again, name in ((pipe, "decoder"), (loaded(qwen3_vl_folder, adapters=names), "new name")):
        loaded_chat = again.load_chat(tmp_path / "chat")
        assert loaded_chat.adapter == name
        assert loaded_chat.ask("Why?", max_new_tokens=COUNT).token_ids == following
    without = loaded(qwen3_vl_folder)
    other = loaded(qwen3_vl_folder, adapters={"mine": folders["towers"]})
    own, mine = (one.fingerprint_with(one.adapters[-1])[-64:][:12] for one in (pipe, other))
    for again, there in ((without, "none"), (other, rf"'mine' \({mine}\)")):
        words = rf"not loaded \(fingerprint {own}; loaded: {there}\): load that adapter too"
        with pytest.raises(InputError, match=words):
            again.load_chat(tmp_path / "chat")
    pipe.chat().save(tmp_path / "plain")
    assert without.load_chat(tmp_path / "plain").adapter is None
    assert without.fingerprint == pipe.fingerprint


def test_told_turns_are_read_with_the_adapter(pipe) -> None:
    said = [("user", "Hello"), ("assistant", "yes"), ("user", "And now?")]
    messages = [{"role": role, "content": text} for role, text in said]
    with pipe.chat(adapter="decoder") as chat:
        chat.tell("Hello", "yes")
        found = chat.ask("And now?", max_new_tokens=COUNT)
    how = {"max_new_tokens": COUNT, "temperature": 0}
    whole, plain = (pipe.chat_completion(messages, **how, adapter=x) for x in ("decoder", None))
    assert found.token_ids == whole.token_ids != plain.token_ids


def test_other_ways_to_ask(pipe, expected) -> None:
    tokens = dict(zip(ROWS, expected(None), strict=True))["decoder", "text"][0]
    asked = [{"role": "user", "content": REQUESTS["text"].prompt}]
    how = {"adapter": "decoder", "max_new_tokens": COUNT, "temperature": 0}
    assert pipe.chat_completion(asked, **how).token_ids == tokens
    stream = pipe.stream(messages=asked, **how)
    assert stream.complete().token_ids == tokens
    for ask in (pipe, pipe.stream, pipe.chat):
        with pytest.raises(InputError, match="adapter: there is none named 'x': choose from 'tow"):
            ask(adapter="x")
    assert "none named 3" in str(pipe.batch([{"prompt": "a", "adapter": 3}])[0].error)
    with pytest.raises(InputError, match="unknown argument adapter"):
        pipe.chat().ask("Why?", adapter="decoder")


def test_adapters_need_names_at_the_pipeline(qwen3_vl_folder) -> None:
    plain = loaded(qwen3_vl_folder)
    assert plain.adapters == ()
    with pytest.raises(InputError, match=r"none named 'a': pass adapters=\{...\} to the pipeline"):
        plain(prompt="a", adapter="a")


@pytest.mark.slow
def test_an_answer_of_an_adapter_is_said(qwen3_omni_talker_folder, tmp_path) -> None:
    from transformers import Qwen3OmniMoeForConditionalGeneration as Omni

    for name, others in (("thinker", r"(talker|code2wav)\..*"), ("both", None)):
        torch.manual_seed(0)
        model = Omni.from_pretrained(qwen3_omni_talker_folder, dtype=torch.float32)
        config = peft.LoraConfig(
            init_lora_weights=False, r=2, target_modules=["q_proj"], exclude_modules=others
        )
        peft.get_peft_model(model, config).save_pretrained(tmp_path / name)
    folders = {"a": tmp_path / "thinker"}
    pipe = OscarOmniPipeline(qwen3_omni_talker_folder, device="cpu", adapters=folders)
    plain, own = (pipe(prompt="Hi", max_new_tokens=8, adapter=one) for one in (None, "a"))
    assert plain.token_ids != own.token_ids
    spoken = pipe(prompt="Hi", max_new_tokens=8, adapter="a", speak=True)
    assert spoken.token_ids == own.token_ids and len(spoken.speech)
    with pytest.raises(InputError, match=r"adapts talker\..*q_proj \(Linear\), but requests"):
        OscarOmniPipeline(qwen3_omni_talker_folder, device="cpu", adapters={"a": tmp_path / "both"})


def test_a_row_is_not_touched_by_other_adapters() -> None:
    """Infinite products of an adapter that a row has not chosen do not change the row."""
    torch.manual_seed(0)
    base = torch.nn.Linear(8, 5)
    down, up = torch.randn(6, 8), torch.randn(5, 6)
    down[:2] = torch.finfo(torch.float32).max
    module = AdaptedLinear(base, down.clone(), up)
    x = torch.randn(3, 2, 8) * 100
    assert not (x @ down[:2].T).isfinite().all()
    idle = torch.ones(6, 6, dtype=torch.bool)
    idle[2:4, 2:] = False
    with torch.no_grad(), choosing(idle):
        found = module(x)
    assert torch.equal(module(x), base(x)), "outside of the block"
    expected = base(x)
    expected[1] += x[1] @ down[2:].T @ up[:, 2:].T
    torch.testing.assert_close(found, expected)
    with choosing(idle[:5]), pytest.raises(RuntimeError):
        module(x)


def test_decoders_of_all_batch_sizes_share_the_matrices(pipe) -> None:
    attention = pipe.model.get_decoder().layers[0].self_attn
    modules = attention.q_proj, attention.k_proj, attention.v_proj
    one, other = (LowRank.of(modules, torch.float32) for _ in range(2))
    assert one is other is not None
    for module in modules:
        for mine, shared in ((module.down, one.down), (module.up, one.up)):
            assert mine.untyped_storage().data_ptr() == shared.untyped_storage().data_ptr()


def test_the_model_is_as_before_where_an_adapter_is_refused(qwen3_vl_folder, folders) -> None:
    model = base_model(qwen3_vl_folder)
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(InputError, match=r"has no adapter_config.json"):
        loaded(model, dtype=None, adapters=folders | {"c": qwen3_vl_folder})
    broken = rewritten(folders["decoder"], r=5)
    with pytest.raises(
        InputError, match=r"'c': the adapter in .* cannot be loaded into this model"
    ):
        loaded(model, dtype=None, adapters={"a": folders["towers"], "c": broken})
    assert [name for name, _ in model.named_modules()] == names
    assert not hasattr(model, "peft_config")
    assert RowAdapters.of(loaded(model, dtype=None).model) is None


def rewritten(folder: Path, **fields: Any) -> Path:
    """A copy of an adapter with other fields in its configuration."""
    copied = folder.with_name(f"{folder.name}-{len(list(folder.parent.iterdir()))}")
    shutil.copytree(folder, copied)
    config = json.loads((copied / "adapter_config.json").read_text()) | fields
    (copied / "adapter_config.json").write_text(json.dumps(config))
    return copied


def refused(checkpoint: Any, adapters: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        loaded(checkpoint, adapters=adapters)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_dora": True}, "has use_dora=True, which requests cannot choose: merge the adapter"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save="),
        ({"layer_replication": [[0, 1]]}, "has layer_replication="),
        ({"bias": "all"}, "has bias='all'"),
        ({"target_parameters": ["mlp.experts.up"]}, "has target_parameters="),
        ({"init_lora_weights": "pissa"}, "for other weights of the base model: save it with path_"),
        ({"r": 1 << 30}, "has rank 1073741824: ranks must be from 1 to 256"),
        ({"r": 0}, "has rank 0"),
        ({"rank_pattern": {"o_proj": 512}}, "has rank 512"),
        ({"rank_pattern": {"o_proj": "3"}}, "has rank '3'"),
        ({"rank_pattern": [3]}, r"has rank_pattern=\[3\], which is not a dict|cannot be read"),
        ({"alpha_pattern": [3]}, "cannot be loaded into this model"),
        ({"lora_alpha": "much"}, "cannot be loaded into this model"),
        ({"target_modules": "("}, "cannot be loaded into this model"),
        ({"target_modules": 3}, "cannot be (loaded into this model|read)"),
        ({"layers_to_transform": "a"}, "cannot be (loaded into this model|read)"),
        ({"target_modules": ["no_such"]}, "cannot be loaded into this model"),
        ({"target_modules": ["q_proj"]}, r"has \d+ unexpected weights, such as .*: it belongs to"),
        ({"target_modules": ["q_proj", "lm_head"]}, "missing weights"),
        ({"peft_type": "LOHA"}, "is not LoRA|cannot be read"),
        ({"lora_alpha": 1e39}, "infinite or NaN"),
    ],
)
def test_configurations_that_are_refused(qwen3_vl_folder, folders, fields, words) -> None:
    refused(qwen3_vl_folder, {"c": rewritten(folders["decoder"], **fields)}, words)


def test_folders_and_names_that_are_refused(qwen3_vl_folder, folders, tmp_path) -> None:
    good = folders["decoder"]
    for adapters, words in (
        (["a"], r"adapters: must be a dict from name to folder, such as .* not \['a'\]"),
        ({"": good}, "adapters: '' is not a name: it must have 1 to 256 printable"),
        ({"a\n": good}, "is not a name"),
        ({3: good}, "adapters: 3 is not a name"),
        ({"a": None}, "adapters: 'a' needs the path of a folder, not None"),
        ({"a": "no/such"}, "adapters: 'a': the adapter in no/such has no adapter_config.json"),
        ({str(at): good for at in range(MAX_ADAPTERS + 1)}, "33 are more than the limit of 32"),
        ({str(at): rewritten(good, r=250) for at in range(5)}, "add up to 1,250, more than 1,024"),
    ):
        refused(qwen3_vl_folder, adapters, words)
    broken = rewritten(good)
    (broken / "adapter_config.json").write_text("[")
    refused(qwen3_vl_folder, {"a": broken}, "has an adapter_config.json that cannot be read")
    (broken / "adapter_config.json").write_text(" " * (1 << 21))
    refused(qwen3_vl_folder, {"a": broken}, "of more than 1,048,576 bytes")
    head = save_adapter(qwen3_vl_folder, tmp_path / "head", r=2, target_modules=["lm_head"])
    refused(qwen3_vl_folder, {"a": head}, r"adapts lm_head \(Linear\), but requests can choose")


def test_files_that_are_refused(qwen3_vl_folder, folders) -> None:
    large = rewritten(folders["decoder"])
    file = large / "adapter_model.safetensors"
    weights = load_file(file)
    name = next(iter(weights))
    save_file(weights | {"more": torch.zeros(1 << 20)}, file)
    refused(qwen3_vl_folder, {"a": large}, "has more weights in adapter_model.safetensors than the")
    save_file(weights | {name: torch.full_like(weights[name], torch.nan)}, file)
    tensor = name.removeprefix("base_model.model.").removesuffix(".weight")
    words = f"infinite or NaN in the model's dtype, in {tensor}: pass an intact adapter"
    refused(qwen3_vl_folder, {"a": large}, words)
    save_file({other: weights[other] for other in weights if other != name}, file)
    missing = rf"'{name.removesuffix('.weight')}\..*\.weight': it belongs to another model"
    refused(qwen3_vl_folder, {"a": large}, f"has 1 missing weights, such as {missing}")
    file.write_bytes(file.read_bytes()[:-5])
    refused(qwen3_vl_folder, {"a": large}, "cannot be loaded into this model")
    file.unlink()
    (large / "adapter_model.bin").write_bytes(b"pickled")
    refused(qwen3_vl_folder, {"a": large}, "has no adapter_model.safetensors: pass a folder that")


def test_models_that_have_an_adapter_already(qwen3_vl_folder, folders) -> None:
    words = "has an adapter for all requests already: load the base model, and name that adapter"
    refused(folders["towers"], {"a": folders["decoder"]}, words)
