"""The `oscar-mm` command line: register the commands in apps/, and print errors as one line."""

import atexit
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

import oscar_mm
from oscar_mm.apps.ask import ask
from oscar_mm.apps.audio_qa.command import audio_qa_command
from oscar_mm.apps.bench import bench
from oscar_mm.apps.chat import chat
from oscar_mm.apps.demo.command import demo
from oscar_mm.apps.doctor import doctor
from oscar_mm.apps.inspect import inspect
from oscar_mm.apps.plan import plan
from oscar_mm.apps.serve.command import serve
from oscar_mm.apps.verify.command import verify
from oscar_mm.errors import InputError

DEBUG_VARIABLE = "OSCAR_MM_DEBUG"
EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2

# Since 0.2x, typer ships its own click, and this is the only subclass of usage errors it exports.
_UsageError: Any = typer.BadParameter.__bases__[0]

app = typer.Typer(
    help="Ask multimodal models about images, video and sound with a low-bit KV cache.",
    epilog=f"{DEBUG_VARIABLE}=1 shows the full traceback of an unexpected error.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(ask)
app.command("audio-qa")(audio_qa_command)
app.add_typer(bench, name="bench")
app.command()(chat)
app.command()(demo)
app.command()(doctor)
app.command()(inspect)
app.command()(plan)
app.command()(serve)
app.command()(verify)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"oscar-mm {oscar_mm.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 (failure), 2 (bad input), 130 (Ctrl-C)."""
    try:
        return app(arguments, prog_name="oscar-mm", standalone_mode=False) or 0
    except InputError as error:
        _complain(str(error))
        return EXIT_BAD_INPUT
    except _UsageError as error:
        _complain(error.format_message())
        return EXIT_BAD_INPUT
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE) == "1":
            traceback.print_exc()
        else:
            _complain(f"{type(error).__name__}: {error} ({DEBUG_VARIABLE}=1 shows the traceback)")
        return EXIT_FAILURE


def _complain(message: str) -> None:
    print("oscar-mm: error:", " ".join(message.split()), file=sys.stderr)


def main() -> None:
    """Entry point of the `oscar-mm` script."""
    code = EXIT_FAILURE

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # The pipe or the stream may be closed.
                stream.flush()
        os._exit(code)

    # Exit without freeing the objects of torch and transformers one by one, which takes a second.
    # Exit functions run in reverse order, so those of the libraries, which are registered later,
    # run before this one.
    atexit.register(leave)
    code = run()
    sys.exit(code)


if __name__ == "__main__":
    main()
