"""The PyTorch engine; the only package that imports torch."""

import gc

_collecting = gc.isenabled()
gc.disable()  # what torch makes as it is imported stays: searching it for garbage takes a tenth of that time
try:
    import torch as torch
finally:
    if _collecting:
        gc.enable()
