"""Programs on top of the library: one module or folder per command."""
