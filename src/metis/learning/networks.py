"""Networks: the paper's CIFAR-10 2-CNN, and small ones for small data.

Each is made from the shape of one example and the number of outputs; `NETWORKS` knows them by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metis.errors import ConfigError


def logistic(input_shape: Sequence[int], outputs: int) -> nn.Module:
    """One linear layer: multinomial logistic regression, or linear regression with one output."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), outputs))


def mlp(
    input_shape: Sequence[int], outputs: int, hidden: Sequence[int] = (64,), dropout: float = 0.0
) -> nn.Module:
    """Fully connected layers with ReLU between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(input_shape)
    for units in hidden:
        layers += [nn.Linear(width, units), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
        width = units
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def small_cnn(
    input_shape: Sequence[int], outputs: int, channels: Sequence[int] = (16, 32), kernel: int = 5
) -> nn.Module:
    """Convolutions that keep the size, each followed by ReLU and 2x2 pooling; then one linear layer."""
    depth, height, width = _image_shape("small_cnn", input_shape)
    if kernel < 1 or kernel % 2 == 0:
        raise ConfigError(f"small_cnn: kernel is {kernel}; it must be odd")
    layers: list[nn.Module] = []
    for filters in channels:
        layers += [nn.Conv2d(depth, filters, kernel, padding=kernel // 2), nn.ReLU(), nn.MaxPool2d(2)]
        depth, height, width = filters, height // 2, width // 2
    if min(height, width) < 1:
        raise ConfigError(
            f"small_cnn: images of shape {tuple(input_shape)} are too small for {len(channels)} poolings"
        )
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(depth * height * width, outputs))


class LocalResponseNormalization(nn.Module):
    """y = x / (k + alpha / size * sum of squares over `size` neighbouring channels)^beta, as torch's module.

    The sum is a 1x1 convolution with a band matrix, which is four to five times as fast as torch's own.
    """

    band: Tensor
    offset: Tensor

    def __init__(
        self, channels: int, size: int = 9, alpha: float = 0.001, beta: float = 0.75, k: float = 1.0
    ) -> None:
        super().__init__()
        self.beta = beta
        distance = torch.arange(channels)[None, :] - torch.arange(channels)[:, None]
        near = (distance >= -(size // 2)) & (distance <= (size - 1) // 2)
        # Constants of the layer: not part of a model.
        self.register_buffer("band", (near * (alpha / size))[:, :, None, None], persistent=False)
        self.register_buffer("offset", torch.full((channels,), k), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        scale = F.conv2d(inputs * inputs, self.band, self.offset)
        if self.beta == 0.75:
            root = scale.rsqrt()
            return inputs * root * root.sqrt()
        return inputs * scale.pow(-self.beta)


def cifar10_cnn(input_shape: Sequence[int] = (3, 24, 24), outputs: int = 10, width: int = 64) -> nn.Module:
    """The 2-CNN of the TensorFlow tutorial (Sec. 6 of the paper): 1,068,298 parameters for 24x24 crops.

    `width` scales every hidden layer. The tutorial's weight decay belongs to the solver, if it is wanted.
    """
    depth, *sides = _image_shape("cifar10_cnn", input_shape)
    for _ in range(2):
        sides = [math.ceil((side - 3) / 2) + 1 for side in sides]
    if min(sides) < 1:
        raise ConfigError(f"cifar10_cnn: images of shape {tuple(input_shape)} are too small for two poolings")
    # ceil_mode is TensorFlow's "SAME" for even sides: the window that hangs over the edge counts.
    return nn.Sequential(
        _normal(nn.Conv2d(depth, width, 5, padding=2), deviation=0.05, bias=0.0),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        LocalResponseNormalization(width),
        _normal(nn.Conv2d(width, width, 5, padding=2), deviation=0.05, bias=0.1),
        nn.ReLU(),
        LocalResponseNormalization(width),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Flatten(),
        _normal(nn.Linear(math.prod(sides) * width, 6 * width), deviation=0.04, bias=0.1),
        nn.ReLU(),
        _normal(nn.Linear(6 * width, 3 * width), deviation=0.04, bias=0.1),
        nn.ReLU(),
        _normal(nn.Linear(3 * width, outputs), deviation=1 / (3 * width), bias=0.0),
    )


def _normal(layer: nn.Conv2d | nn.Linear, deviation: float, bias: float) -> nn.Module:
    """TensorFlow's truncated_normal_initializer, which draws again beyond two standard deviations."""
    nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
    assert layer.bias is not None
    nn.init.constant_(layer.bias, bias)
    return layer


def _image_shape(network: str, input_shape: Sequence[int]) -> tuple[int, int, int]:
    if len(input_shape) != 3:
        raise ConfigError(
            f"{network} needs images of shape (channels, height, width), "
            f"not examples of shape {tuple(input_shape)}"
        )
    depth, height, width = input_shape
    return depth, height, width


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "logistic": logistic,
    "mlp": mlp,
    "small_cnn": small_cnn,
    "cifar10_cnn": cifar10_cnn,
}
