"""One question about pictures and recordings, with the answer printed as it is written:

python pictures_and_sound.py [MODEL FILE... QUESTION]
"""

import sys
from pathlib import Path

from oscar_mm import OscarOmniPipeline

media = Path(__file__).parent / "media"
shown = [media / "cards" / "01.png", media / "clips" / "05.wav"]
model, *files, question = sys.argv[1:] or ["pocket-omni", *shown, "What was said in clip 1?"]
sounds = [file for file in files if Path(file).suffix == ".wav"]
pictures = [file for file in files if file not in sounds]
for piece in OscarOmniPipeline(model).stream(pictures, question, audio=sounds):
    print(piece, end="", flush=True)
