"""Many questions about one recording, which is heard once:

python questions_about_a_recording.py MODEL RECORDING QUESTION...
"""

import sys

from oscar_mm import OscarOmniPipeline

model, recording, *questions = sys.argv[1:]
heard = OscarOmniPipeline(model).chat()
heard.ask("Listen to this.", audio=recording, max_new_tokens=16)
for question in questions:
    with heard.fork() as chat:
        print(question, chat.ask(question, max_new_tokens=64), sep="\n")
heard.save("heard.safetensors")
