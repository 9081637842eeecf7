"""Augmentation as batched tensor operations on images [examples, channels, height, width].

Each function here makes an operation. An operation takes a batch and, if it draws, the learner's own
generator. Semi-synchronous training needs them, because fast learners see their examples often.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from metis.errors import ConfigError

Augmentation: TypeAlias = Callable[[Tensor, torch.Generator], Tensor]
Transform: TypeAlias = Callable[..., Tensor]  # an operation that draws nothing: the generator may be left out


def seeded_generator(seed: int) -> torch.Generator:
    """What operations draw from."""
    return torch.Generator().manual_seed(seed)


def random_crop(size: int, padding: int = 0) -> Augmentation:
    """A window of size x size anywhere in the image, after a border of `padding` zeros was put around it."""
    if size < 1 or padding < 0:
        raise ConfigError(f"random_crop({size}, padding={padding}): size must be at least 1, padding at least 0")
    return functools.partial(_random_crop, size=size, padding=padding)


def horizontal_flip(probability: float = 0.5) -> Augmentation:
    """Mirror each image, left to right, with this probability."""
    if not 0 <= probability <= 1:
        raise ConfigError(f"horizontal_flip({probability}): the probability must be between 0 and 1")
    return functools.partial(_horizontal_flip, probability=probability)


def centre_crop(size: int) -> Transform:
    """The window of size x size in the middle: what an evaluation sees where training sees `random_crop`."""
    if size < 1:
        raise ConfigError(f"centre_crop({size}): size must be at least 1")
    return functools.partial(_centre_crop, size=size)


def random_contrast(lower: float = 0.2, upper: float = 1.8) -> Augmentation:
    """Each channel's distance from its own mean times one factor an image (TensorFlow's random_contrast).

    The tutorial's random brightness is not offered: a constant added to an image is undone when it is standardized.
    """
    if not 0 <= lower <= upper < math.inf:
        raise ConfigError(f"random_contrast({lower}, {upper}): lower must be at least 0 and not above upper")
    return functools.partial(_random_contrast, lower=lower, upper=upper)


def standardize() -> Transform:
    """Each image to mean 0 and standard deviation 1 (TensorFlow's per_image_standardization)."""
    return _standardize


def compose(*operations: Transform) -> Transform:
    """One operation after the other."""
    return functools.partial(_compose, operations=operations)


def cifar_tutorial(size: int = 24) -> tuple[Augmentation, Transform]:
    """The TensorFlow tutorial's transformations for CIFAR: for training, and for evaluation."""
    return (
        compose(random_crop(size), horizontal_flip(), standardize()),
        compose(centre_crop(size), standardize()),
    )


# The operations are functions of the module, bound with partial, so that worker processes can be sent them.


def _random_crop(inputs: Tensor, generator: torch.Generator | None = None, *, size: int, padding: int) -> Tensor:
    images = _channels_last(inputs, "random_crop")
    if padding:
        images = torch.nn.functional.pad(images, (0, 0, padding, padding, padding, padding))
    examples, height, width, channels = images.shape
    _check_window(size, height, width)
    top = _draw_integers(height - size + 1, examples, generator)
    left = _draw_integers(width - size + 1, examples, generator)
    # A row of a window is a contiguous run of size * channels numbers, so the batch is one gather from the
    # overlapping runs that start at each number.
    run, numbers = size * channels, images.numel()
    runs = images.as_strided((max(numbers - run + 1, 0), run), (1, 1))
    first = (torch.arange(examples) * height + top)[:, None] + torch.arange(size)
    starts = (first * width + left[:, None]) * channels
    windows = runs.index_select(0, starts.flatten())
    return windows.view(examples, size, size, channels).permute(0, 3, 1, 2)


def _horizontal_flip(inputs: Tensor, generator: torch.Generator | None = None, *, probability: float) -> Tensor:
    chance = torch.rand(len(inputs), generator=_generator(generator, "horizontal_flip"))
    chosen = (chance < probability).nonzero().flatten()
    flipped = _channels_last(inputs, "horizontal_flip").clone()
    flipped[chosen] = flipped[chosen].flip(2)
    return flipped.permute(0, 3, 1, 2)


def _random_contrast(inputs: Tensor, generator: torch.Generator | None = None, *, lower: float, upper: float) -> Tensor:
    images = _channels_last(inputs, "random_contrast")
    chance = torch.rand(len(images), generator=_generator(generator, "random_contrast"))
    factor = (lower + (upper - lower) * chance)[:, None, None, None]
    mean = images.mean((1, 2), keepdim=True)
    return torch.lerp(mean, images, factor).permute(0, 3, 1, 2)


def _centre_crop(inputs: Tensor, generator: torch.Generator | None = None, *, size: int) -> Tensor:
    images = _channels_last(inputs, "centre_crop")
    _, height, width, _ = images.shape
    _check_window(size, height, width)
    top, left = (height - size) // 2, (width - size) // 2
    return images[:, top : top + size, left : left + size].permute(0, 3, 1, 2)


def _standardize(inputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    # One contiguous row an image: torch reduces several axes of a permuted tensor far more slowly.
    pixels = inputs.permute(0, 2, 3, 1) if inputs.ndim == 4 else inputs
    rows = pixels.flatten(1)
    centred = rows - rows.mean(1, keepdim=True)
    root = math.sqrt(max(rows.shape[1], 1))
    # The norm is ten times as fast as torch's variance; at least TensorFlow's floor for images of one colour.
    deviation = torch.linalg.vector_norm(centred, dim=1, keepdim=True).div_(root).clamp_min_(1 / root)
    standardized = centred.div_(deviation).view(pixels.shape)
    return standardized.permute(0, 3, 1, 2) if inputs.ndim == 4 else standardized


def _compose(inputs: Tensor, generator: torch.Generator | None = None, *, operations: tuple[Transform, ...]) -> Tensor:
    for operation in operations:
        inputs = operation(inputs, generator)
    return inputs


def _channels_last(inputs: Tensor, operation: str) -> Tensor:
    """The batch as [examples, height, width, channels] without gaps; free if that is how it is stored."""
    if inputs.ndim != 4:
        raise ConfigError(
            f"{operation} needs images [examples, channels, height, width], not inputs of shape {tuple(inputs.shape)}"
        )
    return inputs.permute(0, 2, 3, 1).contiguous()


def _check_window(size: int, height: int, width: int) -> None:
    if size > min(height, width):
        raise ConfigError(f"a window of {size} x {size} does not fit in images of {height} x {width}")


def _generator(generator: torch.Generator | None, operation: str) -> torch.Generator:
    if generator is None:
        raise ConfigError(f"{operation} draws and needs a generator; to evaluate, use one that does not draw")
    return generator


def _draw_integers(end: int, count: int, generator: torch.Generator | None) -> Tensor:
    return torch.randint(end, (count,), generator=_generator(generator, "random_crop"))
