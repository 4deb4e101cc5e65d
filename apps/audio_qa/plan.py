"""Plan: what each worker of a run loads, starts or asks."""

from oscar_mm.apps.audio_qa.engine import WorkerSettings
from oscar_mm.apps.audio_qa.server_worker import ServerSettings
from oscar_mm.apps.audio_qa.vllm_settings import VllmSettings

Plan = WorkerSettings | ServerSettings | VllmSettings
