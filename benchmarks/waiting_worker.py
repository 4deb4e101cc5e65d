"""Worker of vLLM that uses the GPU only when its benchmark may begin."""

from __future__ import annotations

# The runner's import takes seconds, so it comes before the wait.
from vllm.v1.worker import gpu_model_runner as gpu_model_runner
from vllm.v1.worker.gpu_worker import Worker

from benchmarks.vllm_process import wait_in_worker


class WaitingWorker(Worker):
    """Worker of a process that starts while another one uses the GPU; see ``waiting_worker``."""

    def init_device(self) -> None:
        """Wait, then do what vLLM's worker does."""
        wait_in_worker()
        super().init_device()
