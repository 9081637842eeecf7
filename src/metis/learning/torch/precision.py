"""Mixed precision: the forward pass in 16 bits where torch says that it may be; weights, steps and mixing in 32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from metis.errors import ConfigError

PRECISIONS = ("float32", "tf32", "bf16", "fp16", "auto")
PrecisionName = Literal["float32", "tf32", "bf16", "fp16", "auto"]

_FIRST_SCALE, _LARGEST_SCALE, _GROWS_AFTER = 2.0**16, 2.0**24, 200  # of the loss in fp16


def fast_bf16(device: torch.device) -> bool:
    """Whether this processor or GPU multiplies numbers of 16 bits; others imitate it, two to three times slower."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return device.type == "cpu" and any(getattr(torch.cpu, check, bool)() for check in checks)


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    """While active, matrices are multiplied with mantissas of 10 bits; torch has this setting for the whole process."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


class Precision:
    """How one engine computes."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype) -> None:
        if name not in PRECISIONS:
            raise ConfigError(f"precision is '{name}'; allowed: {', '.join(PRECISIONS)}")
        if name == "auto":
            name = "bf16" if dtype == torch.float32 and fast_bf16(device) else "float32"
        if name != "float32" and dtype != torch.float32:
            raise ConfigError(f"precision is '{name}', but dtype is {dtype}; weights must be float32 to be mixed")
        if name in ("tf32", "fp16") and device.type != "cuda":
            raise ConfigError(f"precision is '{name}', which needs a GPU, but device is '{device}'; bf16 does not")
        self.name, self._device = name, device
        self._low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        self.start()

    @property
    def plain(self) -> bool:
        """Whether everything is computed in the dtype of the weights."""
        return self._low is None

    def start(self) -> None:
        """A task begins: no engine keeps anything from one to the next."""
        self._scale, self._good = (_FIRST_SCALE if self.name == "fp16" else 1.0), 0

    @contextlib.contextmanager
    def lowered(self) -> Iterator[None]:
        """While active, operations that allow it are in 16 bits."""
        if self.name == "tf32":
            with _tf32():
                yield
            return
        if self._low is None:
            yield
            return
        with torch.autocast(self._device.type, self._low):
            yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this loss; in fp16 enlarged, so that small numbers are not lost."""
        with _tf32() if self.name == "tf32" else contextlib.nullcontext():
            (loss if self._scale == 1 else loss * self._scale).backward()  # type: ignore[no-untyped-call]

    def restore(self, gradient: Tensor) -> bool:
        """Undo the enlarging; False if it was too much, and the step must be left out."""
        if self.name != "fp16":
            return True
        gradient.div_(self._scale)
        if not bool(torch.isfinite(gradient).all()):
            self._scale, self._good = self._scale / 2, 0
            return False
        self._good += 1
        if self._good >= _GROWS_AFTER:
            self._scale, self._good = min(2 * self._scale, _LARGEST_SCALE), 0
        return True
