"""Progress on stderr where somebody looks at it: while weights load and a prompt is read."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress


@contextmanager
def loading() -> Iterator[None]:
    """Transformers' own bar over the weights; nothing if stderr is no terminal."""
    from transformers.utils import logging

    # stdout and stderr are the command's own: errors are shown by the command line.
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    yield


@contextmanager
def prefill(model: Any) -> Iterator[None]:
    """A bar over the decoder's layers during the first forward pass; see ``loading``.

    Args:
        model: a model of transformers that generates.
    """
    if not sys.stderr.isatty():
        yield
        return
    layers = model.get_decoder().layers
    with _bar() as bar:
        task = bar.add_task("reading images and prompt", total=len(layers))

        def advance(*_: object) -> None:
            bar.advance(task)

        hooks = [layer.register_forward_hook(advance) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _bar() -> "Progress":
    from rich.console import Console
    from rich.progress import Progress

    return Progress(console=Console(stderr=True), transient=True)
