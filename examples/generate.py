"""The cache alone, with transformers' own generate: python generate.py [MODEL IMAGE]"""

import sys
from pathlib import Path

from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from oscar_mm import OscarCache, as_argument
from oscar_mm.models import bundled

card = Path(__file__).parent / "media" / "cards" / "01.png"
model, image = sys.argv[1:] or [bundled("pocket-vl"), card]
processor = AutoProcessor.from_pretrained(model)
reader = AutoModelForImageTextToText.from_pretrained(model)
content = [{"type": "image"}, {"type": "text", "text": "What is the code?"}]
talk = [{"role": "user", "content": content}]
text = processor.apply_chat_template(talk, add_generation_prompt=True)
inputs = processor(text=[text], images=[Image.open(image)], return_tensors="pt")
cache = OscarCache("compact", model=reader)
tokens = reader.generate(**inputs, **as_argument(cache), max_new_tokens=16)
print(processor.decode(tokens[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
