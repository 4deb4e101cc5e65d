"""A conversation that continues in another process: python go_on_later.py [MODEL IMAGE...]"""

import sys
from pathlib import Path

from oscar_mm import OscarVLPipeline

saved = Path("conversation.safetensors")
cards = sorted((Path(__file__).parent / "media" / "cards").glob("*.png"))
model, *images = sys.argv[1:] or ["pocket-vl", *cards]
pipe = OscarVLPipeline(model, dtype="bfloat16")
with pipe.load_chat(saved) if saved.is_file() else pipe.chat() as chat:
    shown = [] if saved.is_file() else images
    print(chat.ask("What is the code in picture 5?", images=shown, max_new_tokens=16))
    chat.save(saved)
    print(f"{len(chat.segments)} segments in {saved}; run this again to continue")
