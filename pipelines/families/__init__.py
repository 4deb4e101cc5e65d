"""Model families, one file each; importing this package registers them all."""

import gc
from importlib import import_module
from pkgutil import iter_modules

# The families import torch and transformers, whose many objects all stay. Looking through them for
# garbage again and again would take a tenth of the time.
_collects = gc.isenabled()
gc.disable()
try:
    for _module in iter_modules(__path__):
        import_module(f"{__name__}.{_module.name}")
finally:
    if _collects:
        gc.enable()
