"""A tiny LLaVA-v1.6: CLIP tower, tiles, a text model of Mistral or (Vicuna) Llama."""

from pathlib import Path
from typing import Any

from transformers import (
    GenerationConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
)

from tests.tiny import CLIP_VISION, llama_tokenizer, randomize

# They write what the templates of the hub's checkpoints write, turn by turn.
MEDIA = """
{%- for part in message.content if part.type == 'image' -%}{{ '<image>\\n' }}{%- endfor -%}
{%- for part in message.content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}
""".strip()

TEMPLATES = {
    "mistral": """
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{{ '<<SYS>>\\n' + message.content[0].text + '\\n<</SYS>>\\n\\n' }}
{%- elif message.role == 'user' -%}{{ '[INST] ' }}MEDIA{{ ' [/INST]' }}
{%- else -%}{{ ' ' + message.content[0].text + '</s> ' }}
{%- endif -%}
{%- endfor -%}
""",
    "llama": """
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{ message.content[0].text + ' ' }}
{%- else -%}{{ message.role.upper() + ': ' }}MEDIA{{ ' ' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}
""",
}


def llava_next(folder: Path, *, seed: int, text_model: str = "mistral", **overrides: Any) -> None:
    """LLaVA-v1.6-Mistral, or with ``text_model="llama"`` -Vicuna.

    ``overrides`` go to the text config.
    """
    tokenizer = llama_tokenizer(700)
    pinpoints = [[56, 112], [112, 56], [112, 112], [56, 168], [168, 56]]
    processor = LlavaNextProcessor(
        image_processor=LlavaNextImageProcessor(
            size={"shortest_edge": 56},
            crop_size={"height": 56, "width": 56},
            image_grid_pinpoints=pinpoints,
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATES[text_model].strip().replace("MEDIA", MEDIA),
    )
    text = {
        "model_type": text_model,
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 65536,
        "tie_word_embeddings": False,
    } | overrides
    if text_model == "mistral":
        text.setdefault("sliding_window", None)
    config = LlavaNextConfig(
        text_config=text,
        vision_config=CLIP_VISION,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=pinpoints,
        image_seq_length=16,
    )
    model = LlavaNextForConditionalGeneration(config).eval()
    randomize(model, seed)
    model.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
