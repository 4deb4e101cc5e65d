"""`python -m oscar_mm.apps.demo`: the same as `oscar-mm demo`."""

import sys

from oscar_mm.cli import run

if __name__ == "__main__":
    sys.exit(run(["demo", *sys.argv[1:]]))
