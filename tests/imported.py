"""What processes of tests have imported before they begin: see tests/processes.py.

The names of the package come first, so that each is found where nothing else was imported yet.
"""

# ruff: noqa: F401, F403, I001
import gc
import os

# Otherwise the question whether there is a GPU, which transformers asks when it is imported, makes
# CUDA unusable in a process that is forked from this one.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

from oscar_mm import *

import oscar_mm.cli
import oscar_mm.kernels.numba_vectors
import oscar_mm.pipelines.loading
import transformers.models.auto.modeling_auto
import transformers.models.auto.processing_auto
import transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe
import transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe
import transformers.models.qwen3_vl.modeling_qwen3_vl
import transformers.models.qwen3_vl.processing_qwen3_vl

gc.freeze()  # Nothing of this is garbage, and no process need look through it.
