"""Progress on stderr where somebody looks at it: while weights load and a prompt is read."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def on_loading() -> None:
    """From now on transformers' own bar over the weights; nothing if stderr is no terminal."""
    from transformers.utils import logging

    # stdout and stderr are the command's own: errors are shown by the command line.
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


@contextmanager
def prefill(model: Any) -> Iterator[None]:
    """A bar over the decoder's layers during the first forward pass, on a terminal.

    Args:
        model: a model of transformers that generates.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress

    # Some language models name them otherwise: then there is no bar.
    layers = getattr(model.get_decoder(), "layers", ())
    if not len(layers):
        yield
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading images and prompt", total=len(layers))

        def advance(*_: object) -> None:
            bar.advance(task)

        hooks = [layer.register_forward_hook(advance) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
