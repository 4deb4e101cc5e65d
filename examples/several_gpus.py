"""One model on several GPUs, with a part of every layer on each, which is quicker:

torchrun --nproc-per-node 2 several_gpus.py [MODEL IMAGE...]

or with whole layers on each, which needs no torchrun: python several_gpus.py [MODEL IMAGE...]
"""

import os
import sys
from pathlib import Path

from torch import distributed

from oscar_mm import OscarVLPipeline

cards = sorted((Path(__file__).parent / "media" / "cards").glob("*.png"))
model, *images = sys.argv[1:] or ["pocket-vl", *cards]
divided = "RANK" in os.environ  # torchrun sets it
pipe = OscarVLPipeline(model, **({"tp_plan": "auto"} if divided else {"device_map": "auto"}))
# All processes ask the same question, and one prints the answer.
answer = pipe(images, "What is the code in picture 3?", max_new_tokens=64)
if os.environ.get("RANK", "0") == "0":
    print(answer)
    print(answer.memory)
if divided:
    pipe.release_graphs()  # the next line waits for graphs that hold operations of the group
    distributed.destroy_process_group()
