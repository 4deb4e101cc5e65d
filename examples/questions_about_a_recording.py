"""Many questions about a recording, which the model hears once:

python questions_about_a_recording.py [MODEL RECORDING QUESTION...]
"""

import sys
from pathlib import Path

from oscar_mm import OscarOmniPipeline

clips = Path(__file__).parent / "media" / "clips"
questions = ["What was said?", "Which digits do you hear?"]
model, recording, *questions = sys.argv[1:] or ["pocket-omni", clips / "05.wav", *questions]
heard = OscarOmniPipeline(model).chat()
heard.ask("Listen to this.", audio=recording, max_new_tokens=16)
for question in questions:
    with heard.fork() as chat:
        print(question, chat.ask(question, max_new_tokens=64), sep="\n")
heard.save("heard.safetensors")
