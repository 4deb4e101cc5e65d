"""Three questions about pictures and recordings, whose answers are known: python first_run.py

Exits with 1 if an answer is wrong.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from oscar_mm.sizes import format_bytes

# Tensors of the bundled models are too small for threads. Said before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
MEDIA = Path(__file__).parent / "media"
CARDS = sorted((MEDIA / "cards").glob("*.png"))
CLIPS = sorted((MEDIA / "clips").glob("*.wav"))
# What is shown, the question, the right answer.
PICTURE_QUESTIONS = [
    (f"{len(CARDS)} pictures", CARDS, "What is the code in picture 7?", "YH38"),
    (f"{5 * len(CARDS)} pictures", 5 * CARDS, "What is the sum in picture 57?", "45"),
]
RECORDING_QUESTIONS = [(f"{len(CLIPS)} recordings", CLIPS, "What was said in clip 5?", "19408")]


@contextmanager
def stage(name: str) -> Iterator[None]:
    print(f"{name} ...", end=" ", flush=True)
    start = time.perf_counter()
    yield
    print(f"{time.perf_counter() - start:.1f} s", flush=True)


table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
for column in ("KV cache of", "16-bit", "stored", "ratio", "seconds"):
    table.add_column(column, justify="left" if column == "KV cache of" else "right", no_wrap=True)
wrong = 0

with stage("importing PyTorch and transformers"):
    from transformers.utils import logging

    from oscar_mm import OscarOmniPipeline, OscarVLPipeline
logging.disable_progress_bar()
for kind, model, argument, questions in (
    (OscarVLPipeline, "pocket-vl", "images", PICTURE_QUESTIONS),
    (OscarOmniPipeline, "pocket-omni", "audio", RECORDING_QUESTIONS),
):
    with stage(f"loading {model}, a bundled demo model"):
        # On a CPU the default is float32, also of tokens that are not packed yet.
        pipe = kind(model, dtype="bfloat16")
    for shown, files, question, right in questions:
        start = time.perf_counter()
        with stage(f"reading {shown} and answering"):
            answer = pipe(prompt=question, **{argument: files}, max_new_tokens=16)
        seconds = time.perf_counter() - start
        correct = answer.text == right
        wrong += not correct
        print(f"  {question} {answer.text} ({'right' if correct else f'WRONG: it is {right}'})")
        memory = answer.memory
        sizes = format_bytes(memory.bf16_bytes), format_bytes(memory.kv_bytes)
        table.add_row(shown, *sizes, f"{memory.ratio:.1f}x", f"{seconds:.1f}")
Console(highlight=False).print(table)
sys.exit(1 if wrong else 0)
