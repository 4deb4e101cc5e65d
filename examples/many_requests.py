"""One question about each picture of a folder, several at a time:

python many_requests.py [MODEL FOLDER QUESTION]
"""

import sys
from pathlib import Path

from oscar_mm import OscarVLPipeline

cards = Path(__file__).parent / "media" / "cards"
model, folder, question = sys.argv[1:] or ["pocket-vl", cards, "What is the code?"]
paths = sorted(path for path in Path(folder).iterdir() if path.suffix in (".png", ".jpg"))
requests = [{"images": [path], "prompt": question, "max_new_tokens": 16} for path in paths]
for result in OscarVLPipeline(model).batch_stream(requests, batch_size=8):
    print(paths[result.index].name, result.error or result.answer.text)
