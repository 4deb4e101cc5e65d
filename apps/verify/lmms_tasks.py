"""Tasks of lmms-eval, run through the adapter in ``oscar_mm.apps.lmms_eval``."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any

from oscar_mm.errors import InputError, suggestion
from oscar_mm.extras import require

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline


def check(names: list[str]) -> None:
    """Check that lmms-eval is installed and has the tasks; needs nothing if there are none.

    Raises:
        InputError: if lmms-eval is missing, or has no task of a name.
    """
    if not names:
        return
    require("--tasks", "lmms-eval", "lmms_eval")
    known = _manager().all_tasks
    for name in names:
        if name not in known:
            raise InputError(
                f"--tasks {name}: lmms-eval has no such task{suggestion(name, known)}; "
                "lmms-eval --tasks list shows all"
            )


def run(pipe: Pipeline, names: list[str], limit: int | None) -> dict[str, dict[str, float]]:
    """Return the metrics of each task, by task and metric.

    Args:
        pipe: pipeline whose model and policy answer.
        names: names of the tasks.
        limit: maximum number of questions of each task; None for all.
    """
    from lmms_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports]

    from oscar_mm.apps.lmms_eval import OscarMM

    model: Any = OscarMM(pipe=pipe)
    found = simple_evaluate(
        model=model, tasks=list(names), task_manager=_manager(), limit=limit, log_samples=False
    )
    return {
        task: {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}
        for task, metrics in found["results"].items()
    }


def _manager() -> Any:
    from lmms_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    return TaskManager(model_name="oscar_mm")
