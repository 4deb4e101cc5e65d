"""Several questions about pictures, one after the other: python chat.py MODEL IMAGE..."""

import sys

from oscar_mm import OscarVLPipeline

model, *images = sys.argv[1:]
with OscarVLPipeline(model).chat() as chat:
    print(chat.ask("What do you see?", images=images, max_new_tokens=64))
    print(chat.ask("What else is there?", max_new_tokens=64))
    print(chat.memory)
