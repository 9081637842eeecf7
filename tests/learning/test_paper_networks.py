"""The networks of the paper: their sizes to the parameter, their form, and what they refuse."""

import itertools
import math

import pytest
import torch
from torch import nn

from metis.errors import ConfigError
from metis.learning import NETWORKS, TorchEngine, brain_age_cnn3d, brain_age_mlp, cifar_resnet, femnist_cnn
from metis.learning.torch.networks import PreActivationBlock


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def resnet_parameters(depth: int, classes: int, width: int = 16, channels: int = 3) -> int:
    """Counted from the description: 3x3 convolutions, a projection for each stage, BatchNorm's two, a bias."""
    blocks = (depth - 2) // 6
    stages = [(width, width), (width, 2 * width), (2 * width, 4 * width)]
    convolutions = 9 * channels * width
    convolutions += sum(9 * before * after + 9 * after**2 * (2 * blocks - 1) for before, after in stages)
    projections = sum(before * after for before, after in stages)
    norms = sum(before + after * (2 * blocks - 1) for before, after in stages) + 4 * width
    return convolutions + projections + 2 * norms + (4 * width + 1) * classes


@pytest.mark.parametrize("depth", [8, 20, 32, 50, 56, 110])
@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_resnet_has_the_official_size(depth: int, classes: int) -> None:
    """At every depth of the form 6n + 2."""
    assert parameters(cifar_resnet(outputs=classes, depth=depth)) == resnet_parameters(depth, classes)


def test_cifar_resnet_50_is_three_megabytes_for_cifar_100() -> None:
    """764,468 parameters; with 10 classes 758,618, which is the original paper's 755,802 and three projections."""
    assert parameters(cifar_resnet()) == resnet_parameters(50, 100) == 764_468
    projections = 16 * 16 + 16 * 32 + 32 * 64
    assert parameters(cifar_resnet(outputs=10)) == 755_802 + projections == 758_618


def test_cifar_resnet_goes_as_deep_as_figure_4() -> None:
    """ResNet-200, the largest model of the community computation's benchmark, has (200 - 2) / 6 = 33 blocks a stage."""
    network = cifar_resnet(depth=200)
    assert sum(isinstance(layer, PreActivationBlock) for layer in network.modules()) == 3 * 33
    assert parameters(network) == resnet_parameters(200, 100) == 3_194_868


@pytest.mark.parametrize("depth", [2, 18, 34, 101])
def test_cifar_resnet_refuses_depths_of_imagenet(depth: int) -> None:
    """The error gives depths that can be."""
    with pytest.raises(ConfigError, match=f"depth is {depth}; it must be 6n \\+ 2, such as 20"):
        cifar_resnet(depth=depth)


def test_cifar_resnet_halves_the_image_twice() -> None:
    """32x32 ends as 8x8 with four times the filters; the counters of BatchNorm do not travel as weights."""
    network = cifar_resnet(depth=8, width=4, outputs=7)
    assert isinstance(network, nn.Sequential)
    inputs = torch.zeros(2, 3, 32, 32)
    assert network[:4](inputs).shape == (2, 16, 8, 8)
    assert network(inputs).shape == (2, 7)
    running_statistics = 2 * sum(layer.num_features for layer in network.modules() if isinstance(layer, nn.BatchNorm2d))
    layout = TorchEngine(lambda: cifar_resnet(depth=8, width=4, outputs=7)).layout
    assert layout.size == parameters(network) + running_statistics


def test_cifar_resnet_keeps_the_scale_of_its_inputs_at_the_start() -> None:
    """Fan-in initialization: a convolution of unit noise has about unit variance."""
    torch.manual_seed(0)
    block = PreActivationBlock(64, 64, 1, False, 0.9)
    outputs = block.conv1(torch.randn(4, 64, 16, 16))
    assert outputs[:, :, 1:-1, 1:-1].var().item() == pytest.approx(1, rel=0.1)


def test_cifar_resnet_decay_is_the_share_of_the_past() -> None:
    """One training batch moves the running statistics by 1 - decay."""
    network = cifar_resnet(depth=8, width=4, decay=0.75)
    norm = next(layer for layer in network.modules() if isinstance(layer, nn.BatchNorm2d))
    seen = []
    norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].mean((0, 2, 3))))
    network(torch.randn(8, 3, 16, 16))
    assert norm.running_mean is not None
    torch.testing.assert_close(norm.running_mean, (1 - 0.75) * seen[0])


def test_femnist_cnn_has_leafs_size() -> None:
    """5x5x32, 5x5x64, 7x7x64 -> 2048 -> 62: 6,603,710 parameters."""
    conv1, conv2 = 25 * 32 + 32, 25 * 32 * 64 + 64
    dense = (7 * 7 * 64 * 2048 + 2048) + (2048 * 62 + 62)
    assert parameters(femnist_cnn()) == conv1 + conv2 + dense == 6_603_710
    assert TorchEngine(femnist_cnn).layout.size == 6_603_710


def test_femnist_cnn_width_scales_every_hidden_layer() -> None:
    """A quarter of the width is a sixteenth of the large layer."""
    assert parameters(femnist_cnn(width=8)) == (
        (25 * 8 + 8) + (25 * 8 * 16 + 16) + (49 * 16 * 512 + 512) + (512 * 62 + 62)
    )


def five_cnn_parameters(width: int = 32) -> int:
    filters = [1, width, 2 * width, 4 * width, 8 * width, 8 * width]
    blocks = sum(27 * before * after + after for before, after in itertools.pairwise(filters))
    return blocks + (8 * width * 2 * width + 2 * width) + (2 * width + 1)


def test_brain_age_cnn3d_is_the_papers_eleven_megabytes() -> None:
    """2,948,801 parameters in float32 are 11.2 MiB; the footnote of the paper says 11 MB."""
    assert parameters(brain_age_cnn3d()) == five_cnn_parameters() == 2_948_801
    assert math.floor(4 * parameters(brain_age_cnn3d()) / 2**20) == 11


def test_brain_age_cnn3d_pools_uk_biobank_to_the_last_twelve_voxels() -> None:
    """91x109x91 halved five times is 2x3x2, and the output is one age, at first that of the bias."""
    network = brain_age_cnn3d(width=2)
    assert isinstance(network, nn.Sequential)
    poolings = [layer for layer in network if isinstance(layer, nn.MaxPool3d)]
    assert len(poolings) == 5
    with torch.inference_mode():
        volume = torch.randn(1, 1, 91, 109, 91)
        assert network[:-6](volume).shape == (1, 8 * 2, 2, 3, 2)
        age = network(volume)
    assert age.shape == (1, 1)
    assert age.item() == pytest.approx(62.68, abs=5)


@pytest.mark.parametrize("side", [4, 8, 16, 24, 32, 64])
def test_brain_age_cnn3d_takes_small_volumes_with_the_same_parameters(side: int) -> None:
    """Small sides leave out poolings, never layers; training works in batches of one, as in the paper."""
    network = brain_age_cnn3d((1, side, side, side), width=2).train()
    assert parameters(network) == five_cnn_parameters(width=2)
    outputs = network(torch.randn(1, 1, side, side, side))
    assert outputs.shape == (1, 1)
    outputs.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in network.parameters() if p.grad is not None)


def test_brain_age_cnn3d_needs_volumes() -> None:
    """An image or a crumb of a volume is refused."""
    with pytest.raises(ConfigError, match="needs volumes of shape"):
        brain_age_cnn3d((1, 28, 28))
    with pytest.raises(ConfigError, match="too small"):
        brain_age_cnn3d((1, 3, 9, 9))


def test_brain_age_mlp_starts_at_the_age_given() -> None:
    """218 measures, 32 units, one age; before training its guesses are near `initial_age`."""
    network = brain_age_mlp((218,), initial_age=50.0)
    assert parameters(network) == 218 * 32 + 32 + 32 + 1
    assert network(torch.zeros(3, 218)).tolist() == [[50.0]] * 3


@pytest.mark.parametrize("name", ["cifar_resnet", "femnist_cnn"])
def test_convolutions_need_images(name: str) -> None:
    """A table of features is refused by name."""
    with pytest.raises(ConfigError, match=f"{name} needs images of shape"):
        NETWORKS[name]((64,), 10)
    with pytest.raises(ConfigError, match="too small"):
        NETWORKS[name]((1, 1, 1), 10)
