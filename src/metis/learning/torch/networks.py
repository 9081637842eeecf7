"""Networks: those of the paper, and small ones for small data.

Each is made from the shape of one example and the number of outputs; `NETWORKS` knows them by name. The paper
(Sec. 6) names its networks by where they come from, so sizes and initializations here are those of that code:

    cifar10_cnn      CIFAR-10, the TensorFlow tutorial         1,068,298 parameters, 24x24x3, 10 classes
    cifar_resnet     CIFAR-100, TensorFlow official ResNet-50    764,468 parameters, 32x32x3, 100 classes
    femnist_cnn      ExtendedMNIST, LEAF                       6,603,710 parameters, 28x28, 62 classes
    brain_age_cnn3d  BrainAge, Stripelis et al. 2021           2,948,801 parameters, 91x109x91, one age

All take a `width`: with a smaller one they keep their form and train on two cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metis.errors import ConfigError
from metis.registry import Registry

NETWORKS: Registry[Callable[..., nn.Module]] = Registry("network", "metis.networks")


@NETWORKS.register("logistic")
def logistic(input_shape: Sequence[int], outputs: int) -> nn.Module:
    """One linear layer: multinomial logistic regression, or linear regression with one output."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), outputs))


@NETWORKS.register("mlp")
def mlp(input_shape: Sequence[int], outputs: int, hidden: Sequence[int] = (64,), dropout: float = 0.0) -> nn.Module:
    """Fully connected layers with ReLU between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(input_shape)
    for units in hidden:
        layers += [nn.Linear(width, units), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
        width = units
    return nn.Sequential(*layers, nn.Linear(width, outputs))


@NETWORKS.register("small_cnn")
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
        raise ConfigError(f"small_cnn: images of shape {tuple(input_shape)} are too small for {len(channels)} poolings")
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(depth * height * width, outputs))


class LocalResponseNormalization(nn.Module):
    """y = x / (k + alpha / size * sum of squares over `size` neighbouring channels)^beta, as torch's module.

    The sum is a 1x1 convolution with a band matrix, which is four to five times as fast as torch's own.
    """

    band: Tensor
    offset: Tensor

    def __init__(self, channels: int, size: int = 9, alpha: float = 0.001, beta: float = 0.75, k: float = 1.0) -> None:
        super().__init__()
        self.beta = beta
        distance = torch.arange(channels)[None, :] - torch.arange(channels)[:, None]
        near = (distance >= -(size // 2)) & (distance <= (size - 1) // 2)
        # Constants of the layer: not part of a model.
        self.register_buffer("band", (near * (alpha / size))[:, :, None, None], persistent=False)
        self.register_buffer("offset", torch.full((channels,), k), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.beta == 0.75 and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            normalized: Tensor = _Normalize.apply(inputs, self.band, self.offset)[0]  # type: ignore[no-untyped-call]
            return normalized
        scale = F.conv2d(inputs * inputs, self.band, self.offset)
        return inputs * (_power(scale) if self.beta == 0.75 else scale.pow(-self.beta))


def _power(scale: Tensor) -> Tensor:
    """scale^-0.75, many times faster than `pow`."""
    root = scale.rsqrt()
    return root.sqrt() * root


class _Normalize(torch.autograd.Function):
    """x / scale^0.75 with its derivative written out, for which autograd goes through memory twice as often."""

    generate_vmap_rule = True

    @staticmethod
    def forward(inputs: Tensor, band: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale = F.conv2d(inputs * inputs, band.to(inputs.dtype), offset.to(inputs.dtype))
        power = _power(scale)
        return inputs * power, scale, power

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        images, band, _ = inputs
        _, scale, power = output
        ctx.mark_non_differentiable(scale, power)
        ctx.save_for_backward(images, band, scale, power)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, None, None]:
        images, band, scale, power = ctx.saved_tensors
        direct = gradient * power
        # Whose neighbour a channel is, not which neighbours it has: the transpose.
        shared = F.conv2d(direct * images / scale, band.transpose(0, 1).to(images.dtype))
        return torch.addcmul(direct, images, shared, value=-1.5), None, None


@NETWORKS.register("cifar10_cnn")
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
        # The paper's order is ReLU, pooling: the other way round gives the same bits for a quarter of ReLU's work.
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.ReLU(),
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


class PreActivationBlock(nn.Module):
    """Two 3x3 convolutions, each after BatchNorm and ReLU; the shortcut is a 1x1 convolution or nothing.

    "Version 2" of the TensorFlow official models: the projection comes after the first BatchNorm and ReLU.
    """

    def __init__(self, depth: int, filters: int, chunk_size: int, project: bool, decay: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = _batch_norm(depth, decay), _batch_norm(filters, decay)
        self.conv1 = _fan_in(nn.Conv2d(depth, filters, 3, chunk_size, padding=1, bias=False))
        self.conv2 = _fan_in(nn.Conv2d(filters, filters, 3, padding=1, bias=False))
        self.shortcut = _fan_in(nn.Conv2d(depth, filters, 1, chunk_size, bias=False)) if project else None

    def forward(self, inputs: Tensor) -> Tensor:
        active = F.relu(self.norm1(inputs))
        shortcut = inputs if self.shortcut is None else self.shortcut(active)
        outputs: Tensor = self.conv2(F.relu(self.norm2(self.conv1(active)))) + shortcut
        return outputs


@NETWORKS.register("cifar_resnet")
def cifar_resnet(
    input_shape: Sequence[int] = (3, 32, 32),
    outputs: int = 100,
    depth: int = 50,
    width: int = 16,
    decay: float = 0.997,
) -> nn.Module:
    """The small-image ResNet of the TensorFlow official models (r1.13), as the paper has it for CIFAR-100.

    Its depth is 6n + 2 (20, 32, 44, 50, 56, 110, 200, ...): three stages of n blocks with 16, 32 and 64
    filters. That code's default is version 2 (pre-activation), without bottlenecks and with a projection at
    the start of all three stages, so ResNet-50 has 764,468 parameters for 100 classes: 3.1 MB, where the paper
    says 5 MB. (ImageNet's ResNet-50 would be 94 MB.) `decay` is that of BatchNorm's running statistics; in
    runs of less than some thousand steps 0.9 is better.
    """
    channels, *sides = _image_shape("cifar_resnet", input_shape)
    if depth < 8 or depth % 6 != 2:
        raise ConfigError(f"cifar_resnet: depth is {depth}; it must be 6n + 2, such as 20, 32, 44, 50, 56, 110 or 200")
    if not 0 <= decay < 1:
        raise ConfigError(f"cifar_resnet: decay is {decay}; it must be at least 0 and less than 1")
    if min(sides) < 2:
        raise ConfigError(f"cifar_resnet: images of shape {tuple(input_shape)} are too small")
    layers: list[nn.Module] = [_fan_in(nn.Conv2d(channels, width, 3, padding=1, bias=False))]
    held = width
    for filters, chunk_size in ((width, 1), (2 * width, 2), (4 * width, 2)):
        for block in range((depth - 2) // 6):
            first = block == 0
            layers.append(PreActivationBlock(held, filters, chunk_size if first else 1, first, decay))
            held = filters
    layers += [_batch_norm(held, decay), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, _glorot(nn.Linear(held, outputs)))


@NETWORKS.register("femnist_cnn")
def femnist_cnn(input_shape: Sequence[int] = (1, 28, 28), outputs: int = 62, width: int = 32) -> nn.Module:
    """The 2-CNN of LEAF, which the paper has for ExtendedMNIST: 6,603,710 parameters for 28x28 and 62 classes.

    5x5x32 and 5x5x64 convolutions, each with 2x2 pooling, then 2,048 units; `width` scales all of them.
    """
    depth, *sides = _image_shape("femnist_cnn", input_shape)
    sides = [side // 4 for side in sides]
    if min(sides) < 1:
        raise ConfigError(f"femnist_cnn: images of shape {tuple(input_shape)} are too small for two poolings")
    return nn.Sequential(
        # ReLU, pooling is LEAF's order: the other way round gives the same bits for a quarter of ReLU's work.
        _glorot(nn.Conv2d(depth, width, 5, padding=2)),
        nn.MaxPool2d(2),
        nn.ReLU(),
        _glorot(nn.Conv2d(width, 2 * width, 5, padding=2)),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        _glorot(nn.Linear(math.prod(sides) * 2 * width, 64 * width)),
        nn.ReLU(),
        _glorot(nn.Linear(64 * width, outputs)),
    )


@NETWORKS.register("brain_age_cnn3d")
def brain_age_cnn3d(
    input_shape: Sequence[int] = (1, 91, 109, 91),
    outputs: int = 1,
    width: int = 32,
    initial_age: float = 62.68,
) -> nn.Module:
    """The paper's 5-CNN for BrainAge (Stripelis et al. 2021, as in the authors' code): 2,948,801 parameters.

    Five blocks of a 3x3x3 convolution (32, 64, 128, 256, 256 filters), instance normalization without
    parameters, 2x2x2 pooling and ReLU; a 1x1x1 convolution to 64, normalized; the mean over what is left of
    the volume; one linear output, whose bias starts at the mean age of UK Biobank. `width` is the number of
    filters of the first block and scales the others. Blocks that would pool a volume to less than 2 voxels a
    side do not pool, so that there remains something to normalize: at 91x109x91 all five do.
    """
    if len(input_shape) != 4:
        raise ConfigError(
            "brain_age_cnn3d needs volumes of shape (channels, depth, height, width), "
            f"not examples of shape {tuple(input_shape)}"
        )
    depth, *sides = input_shape
    if min(sides) < 4:
        raise ConfigError(f"brain_age_cnn3d: volumes of shape {tuple(input_shape)} are too small; 4 voxels a side do")
    layers: list[nn.Module] = []
    for filters in (width, 2 * width, 4 * width, 8 * width, 8 * width):
        layers += [_glorot(nn.Conv3d(depth, filters, 3, padding=1)), nn.InstanceNorm3d(filters)]
        if min(sides) >= 4:
            layers.append(nn.MaxPool3d(2))
            sides = [side // 2 for side in sides]
        layers.append(nn.ReLU())
        depth = filters
    layers += [_glorot(nn.Conv3d(depth, 2 * width, 1)), nn.InstanceNorm3d(2 * width), nn.ReLU()]
    # At 91x109x91 2x3x2 voxels are left, all of which the authors' average pooling takes: it is the mean.
    layers += [nn.AdaptiveAvgPool3d(1), nn.Flatten()]
    return nn.Sequential(*layers, _glorot(nn.Linear(2 * width, outputs), bias=initial_age))


@NETWORKS.register("brain_age_mlp")
def brain_age_mlp(
    input_shape: Sequence[int],
    outputs: int = 1,
    width: int = 32,
    dropout: float = 0.0,
    initial_age: float = 40.0,
) -> nn.Module:
    """One hidden layer for an age from a table of measures; the output's bias starts at `initial_age`.

    Plain SGD on squared years would spend its first epochs on finding the mean, and with a bias of 0 the first
    steps are so large that they can diverge.
    """
    layers: list[nn.Module] = [nn.Flatten(), _glorot(nn.Linear(math.prod(input_shape), width)), nn.ReLU()]
    if dropout:
        layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, _glorot(nn.Linear(width, outputs), bias=initial_age))


# --- initializations as in TensorFlow -------------------------------------------------------------


def _normal(layer: nn.Conv2d | nn.Linear, deviation: float, bias: float) -> nn.Module:
    """TensorFlow's truncated_normal_initializer, which draws again beyond two standard deviations."""
    nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
    assert layer.bias is not None
    nn.init.constant_(layer.bias, bias)
    return layer


def _glorot(layer: nn.Conv2d | nn.Conv3d | nn.Linear, bias: float = 0.0) -> nn.Module:
    """The default of tf.layers and Keras: Glorot's uniform weights, constant biases."""
    nn.init.xavier_uniform_(layer.weight)
    assert layer.bias is not None
    nn.init.constant_(layer.bias, bias)
    return layer


def _fan_in(layer: nn.Conv2d) -> nn.Module:
    """tf.variance_scaling_initializer: a normal cut at two deviations that has the variance 1 / fan_in."""
    deviation = 1 / math.sqrt(layer.weight[0].numel()) / 0.87962566103423978
    nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
    return layer


def _batch_norm(channels: int, decay: float) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-5, momentum=1 - decay)


def _image_shape(network: str, input_shape: Sequence[int]) -> tuple[int, int, int]:
    if len(input_shape) != 3:
        raise ConfigError(
            f"{network} needs images of shape (channels, height, width), not examples of shape {tuple(input_shape)}"
        )
    depth, height, width = input_shape
    return depth, height, width
