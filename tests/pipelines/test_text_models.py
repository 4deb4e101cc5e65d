"""Language models in a pipeline: what plain transformers computes, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from oscar_mm import InputError, KVPolicy, OscarVLPipeline
from oscar_mm.admission.capacity import ModelShape
from oscar_mm.cli import run
from oscar_mm.engine.message import first_turn
from oscar_mm.engine.prefill import read_prompt
from oscar_mm.fast_decode.decoder import supports
from oscar_mm.media.media import Media
from oscar_mm.pipelines import pipeline_for
from tests.languages import CHATML, build_language_model
from tests.prompts import clip, noise
from tests.tiny import qwen_tokenizer

# Mistral's template adds strings, and fails where it gets a list of parts.
INSTRUCT = """
{%- for message in messages -%}
{%- if message.role == 'user' -%}{{ '[INST] ' + message.content + ' [/INST]' }}
{%- else -%}{{ ' ' + message.content + '<|im_end|>' }}{%- endif -%}
{%- endfor -%}
""".strip()
LINEAR = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""Two layers of Gated DeltaNet and one of attention."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"template": INSTRUCT}),
    "mistral with a window": ("mistral", {"sliding_window": 24, "template": INSTRUCT}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 with experts": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "cohere2": ("cohere2", {}),
    "Gemma 3": (
        "gemma3_text",
        {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
        | {"sliding_window": 24},
    ),
    "Gemma 4": (
        "gemma4_text",
        {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
        | {"sliding_window": 24, "num_global_key_value_heads": 1, "global_head_dim": 128}
        | {"attention_k_eq_v": True, "use_bidirectional_attention": "vision"}
        | {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 2.0}
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        | {"moe_intermediate_size": 32},
    ),
    "gpt-oss": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    ),
    "qwen3_next": ("qwen3_next", LINEAR | {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_5_text": ("qwen3_5_text", LINEAR),
}
FAST = {"llama", "mistral", "qwen2", "qwen3", "qwen3 with experts", "qwen3_next", "qwen3_5_text"}
QUESTIONS = (
    "What did the user ask about the sign? ",
    "How much does the bread cost, and which month was the wettest?",
    "Why?",
)
NEVER = 1 << 20
"""An end token that no model chooses."""


class Language:
    """A checkpoint in a pipeline that loses nothing, and in plain transformers."""

    def __init__(self, folder: Path) -> None:
        self.pipe = OscarVLPipeline(folder, policy="bf16", device="cpu")
        self.pipe.model.generation_config.eos_token_id = NEVER
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def asked(self, question: str) -> str:
        turn = [{"role": "user", "content": question}]
        return self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)

    def greedy(self, ids: list[int], answer: list[int]) -> list[int]:
        """The tokens after the ids and after each token of an answer, by a pass over all tokens
        without a cache. They are the answer if and only if greedy decoding writes it."""
        with torch.no_grad():
            logits = self.model(torch.tensor([ids + answer[:-1]]), use_cache=False).logits
        return logits[0, -len(answer) :].argmax(-1).tolist()


@pytest.fixture(scope="module")
def languages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Language]:
    made = {}
    for number, (name, (kind, fields)) in enumerate(MODELS.items()):
        folder = tmp_path_factory.mktemp("language") / kind
        options = {"template": CHATML} | fields
        made[name] = Language(build_language_model(kind, folder, seed=number, **options))
    return made


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_transformers(languages, name: str) -> None:
    one = languages[name]
    assert supports(one.pipe.model) == (name in FAST)
    requests = []
    for question in QUESTIONS:
        ids = one.ids(one.asked(question))
        prompt = one.pipe.family.prompt(first_turn(question, []), Media())
        assert prompt.inputs["input_ids"].tolist() == [ids]
        with torch.inference_mode():
            expected = one.model(torch.tensor([ids])).logits[:, -1]
        found = read_prompt(one.pipe.model, prompt, one.pipe.new_cache())
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
        request = {"prompt": question, "max_new_tokens": 8}
        answer = one.pipe(**request).token_ids
        assert len(answer) == 8 and answer == one.greedy(ids, answer)
        requests.append((request, answer))
    results = one.pipe.batch([request for request, _ in requests])
    assert [result.answer.token_ids for result in results] == [made for _, made in requests]


@pytest.mark.parametrize("name", MODELS)
def test_prompts_in_chunks(languages, name: str) -> None:
    one = languages[name]
    ids = torch.tensor([one.ids(one.asked(QUESTIONS[1] * 2))])
    prompt = one.pipe.family.prompt(first_turn(QUESTIONS[1] * 2, []), Media())
    with torch.inference_mode():
        expected = one.model(ids).logits[0]
    found = read_prompt(one.pipe.model, prompt, one.pipe.new_cache(), 17)
    torch.testing.assert_close(found[0], expected[-1], atol=2e-4, rtol=2e-4)
    asked: Any = {"prompt": QUESTIONS[1] * 2, "max_new_tokens": 1, "prompt_logprobs": 0}
    logprobs = one.pipe(**asked).prompt_logprobs
    expected = expected[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    assert [x.logprob for x in logprobs] == pytest.approx(expected.tolist(), abs=1e-3)


def test_prompts_share_a_pass(languages) -> None:
    one, passes = languages["qwen3"], list[int]()
    layer = one.pipe.model.get_decoder().layers[0]
    hook = layer.register_forward_pre_hook(lambda _, given: passes.append(given[0].shape[1]))
    texts = [one.asked(question) for question in QUESTIONS]
    one.pipe.batch([{"prompt": question, "max_new_tokens": 1} for question in QUESTIONS])
    hook.remove()
    assert passes == [sum(len(one.ids(text)) for text in texts)]


@pytest.mark.daily("mistral with a window", "gpt-oss", "qwen3_next", "qwen3_5_text")
@pytest.mark.parametrize(
    "name",
    (
        *("mistral", "mistral with a window", "qwen3", "cohere2"),
        *("Gemma 4", "gpt-oss", "qwen3_next", "qwen3_5_text"),
    ),
)
def test_turns_are_those_of_transformers(languages, name: str, tmp_path: Path) -> None:
    """Each turn after the tokens of all earlier ones; the last in a chat that was saved."""
    one = languages[name]
    end = {"mistral": "<|im_end|>"}.get(name.split()[0], "<|im_end|>\n")
    chat, ids = one.pipe.chat(), list[int]()
    for turn, question in enumerate(QUESTIONS):
        ids += one.ids((end if turn else "") + one.asked(question))
        if turn == 2:
            chat.save(tmp_path / "chat.oscar")
            chat = one.pipe.load_chat(tmp_path / "chat.oscar")
        answer = chat.ask(question, max_new_tokens=9).token_ids
        assert answer == one.greedy(ids, answer)
        ids += answer


def test_prefixes_are_shared(languages) -> None:
    one = languages["qwen3"]
    pipe = OscarVLPipeline(
        one.pipe.model, processor=one.tokenizer, policy="bf16", prefix_cache="1MB"
    )
    system = "Answer in one sentence. " * 30
    for number, question in enumerate(QUESTIONS):
        turns = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        text = one.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        answer = pipe(prompt=question, system=system, max_new_tokens=6)
        assert answer.token_ids == one.greedy(one.ids(text), answer.token_ids)
        assert pipe.prefixes is not None
        assert (pipe.prefixes.tokens_saved > 0) == (number > 0)


@pytest.mark.parametrize("policy", ["bf16", "standard"])
def test_layers_may_have_different_heads(languages, policy: str) -> None:
    """What is expected before layers have pools is what their pools have."""
    one = languages["Gemma 4"]
    pipe = OscarVLPipeline(one.pipe.model, processor=one.tokenizer, policy=policy)
    expected = [(shape.kv_heads, shape.head_dim) for shape in pipe.admission.layer_shapes]
    report = pipe(prompt=QUESTIONS[0] * 20, max_new_tokens=8).memory
    pools = [pool for _, pool in sorted(pipe.store.layers.items())]
    assert [(pool.kv_heads, pool.head_dim) for pool in pools] == expected == [(2, 64), (1, 128)]
    if policy == "standard":
        assert report.kv_bytes < report.bf16_bytes
    shape = ModelShape.of(pipe.model.config, 0)
    bytes_each = 2 * sum(heads * channels * 2 for heads, channels in expected)
    assert shape.kv_bytes(KVPolicy.preset("bf16"), {"text": 100}) == 100 * bytes_each


def test_packed_pages(languages) -> None:
    one = languages["qwen3"]
    pipe = OscarVLPipeline(one.pipe.model, processor=one.tokenizer, policy="compact")
    report = pipe(prompt=QUESTIONS[0] * 20, max_new_tokens=8).memory
    assert report.kv_bytes < report.bf16_bytes


def test_a_server(languages) -> None:
    openai = pytest.importorskip("openai", reason="needs the openai package")
    from tests.apps.serve.conftest import encoded, png, served

    pipe, question = languages["qwen3"].pipe, QUESTIONS[1]
    with served(pipe) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0)
        turn: Any = {"role": "user", "content": question}
        ask = client.chat.completions.create
        answer = ask(model="tiny", messages=[turn], max_tokens=9, temperature=0)
        assert answer.choices[0].message.content == pipe(prompt=question, max_new_tokens=9).text
        url = {"url": f"data:image/png;base64,{encoded(png())}"}
        turn = {"role": "user", "content": [{"type": "image_url", "image_url": url}]}
        with pytest.raises(openai.BadRequestError, match="qwen3 does not support image"):
            ask(model="tiny", messages=[turn])
        client.close()


def test_media_are_refused(languages) -> None:
    pipe = languages["llama"].pipe
    for shown in ({"images": [noise(32, 32)]}, {"videos": [clip(4)]}):
        with pytest.raises(InputError, match=r"llama does not support \w+; it supports text only"):
            pipe(prompt="What?", **shown)


def test_commands(tmp_path: Path, capsys) -> None:
    folder = build_language_model("llama", tmp_path / "llama", template=CHATML)
    assert pipeline_for(folder) is OscarVLPipeline
    model = ["--model", str(folder), "--device", "cpu"]
    assert run(["ask", *model, "-p", "Why?", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.strip()
    assert run(["ask", "-p", "Why?"]) == 2
    assert "pass an image, a video or a recording, or a model" in capsys.readouterr().err
    assert run(["verify", *model, "--out", str(tmp_path / "rows.json")]) == 2
    assert "reads text only" in capsys.readouterr().err


REFUSED = {
    "bloom": "ALiBi",
    "diffllama": "its logits with the cache differ",
    "doge": "its logits with the cache differ",
    "deepseek_v3": "latent attention",
    "falcon": "attention of its own",
    "gemma2": "soft-capped attention scores",
    "gpt2": "layers are not a list named layers",
    "jamba": "layers of linear_attention",
    "mimo_v2_flash": "keys and values of different sizes",
    "whisper": "an encoder and cross-attention",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"vocab_size": 400, "hidden_size": 64, "num_attention_heads": 4}
    if name in ("diffllama", "doge"):
        build_language_model(name, tmp_path, template=CHATML)
    else:
        AutoConfig.for_model(name, **fields).save_pretrained(tmp_path)
        qwen_tokenizer(400).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"{tmp_path}: {name} has .*{REFUSED[name]}.*use a model"):
        OscarVLPipeline(tmp_path, device="cpu")
