"""Several questions about pictures, one after another: python chat.py [MODEL IMAGE...]"""

import sys
from pathlib import Path

from oscar_mm import OscarVLPipeline

cards = sorted((Path(__file__).parent / "media" / "cards").glob("*.png"))
model, *images = sys.argv[1:] or ["pocket-vl", *cards]
with OscarVLPipeline(model, dtype="bfloat16").chat() as chat:
    print(chat.ask("What is the code in picture 3?", images=images, max_new_tokens=64))
    print(chat.ask("What is the sum in picture 16?", max_new_tokens=64))
    print(chat.memory)
