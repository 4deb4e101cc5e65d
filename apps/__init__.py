"""Command-line programs built on the library, with one module or folder per command."""
