"""``python -m oscar_mm``: the command line where its script is not on the path."""

from oscar_mm.cli import main

main()
