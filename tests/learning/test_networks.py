"""The networks: shapes, sizes, and the parts that are not torch's own."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from metis.errors import ConfigError
from metis.learning import NETWORKS, TorchEngine, cifar10_cnn, femnist_cnn, small_cnn
from metis.learning.torch.networks import LocalResponseNormalization


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_cifar10_cnn_has_the_tutorials_size() -> None:
    """Two 5x5 convolutions of 64 filters, 6x6x64 -> 384 -> 192 -> 10: 1,068,298 numbers travel, no more."""
    conv1, conv2 = 5 * 5 * 3 * 64 + 64, 5 * 5 * 64 * 64 + 64
    dense = (6 * 6 * 64 * 384 + 384) + (384 * 192 + 192) + (192 * 10 + 10)
    assert parameters(cifar10_cnn()) == conv1 + conv2 + dense == 1_068_298
    assert TorchEngine(cifar10_cnn).layout.size == 1_068_298


def test_cifar10_cnn_starts_as_the_tutorial() -> None:
    """Truncated normal weights, biases 0 or 0.1."""
    torch.manual_seed(0)
    layers = [layer for layer in cifar10_cnn() if isinstance(layer, (nn.Conv2d, nn.Linear))]  # type: ignore[attr-defined]
    truncation = 0.8796  # standard deviation of a standard normal cut at two
    for layer, deviation, bias in zip(
        layers, (0.05, 0.05, 0.04, 0.04, 1 / 192), (0.0, 0.1, 0.1, 0.1, 0.0), strict=True
    ):
        assert layer.weight.std().item() == pytest.approx(truncation * deviation, rel=0.05)
        assert layer.weight.abs().max().item() <= 2 * deviation
        assert layer.bias is not None
        assert torch.all(layer.bias == bias)


@pytest.mark.parametrize(("size", "beta"), [(9, 0.75), (9, 0.5), (4, 0.75), (1, 0.75)])
def test_local_response_normalization_equals_torchs(size: int, beta: float) -> None:
    """In the outputs and in the gradient, for odd and even windows."""
    ours = LocalResponseNormalization(16, size, alpha=0.1, beta=beta, k=1.0).double()
    theirs = nn.LocalResponseNorm(size, alpha=0.1, beta=beta, k=1.0)
    inputs = 3 * torch.randn(2, 16, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pulls = torch.randn(2, 16, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for layer in (ours, theirs):
        given = inputs.clone().requires_grad_()
        outputs = layer(given)
        outputs.backward(pulls)
        results.append((outputs.detach(), given.grad))
    # alpha / size is kept in float32
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


def test_local_response_normalization_of_many_at_once() -> None:
    """As learners that train together and gradients of single examples have it."""
    layer = LocalResponseNormalization(8)
    inputs = torch.randn(3, 2, 8, 5, 5, generator=torch.Generator().manual_seed(0))

    def loss(given: Tensor) -> Tensor:
        total: Tensor = layer(given).square().sum()
        return total

    together = torch.func.vmap(torch.func.grad(loss))(inputs)
    torch.testing.assert_close(together, torch.stack([torch.func.grad(loss)(given) for given in inputs]))


def test_cifar10_cnn_width_scales_every_hidden_layer() -> None:
    """A narrow one for tests and laptops has the same form."""
    narrow = cifar10_cnn(width=8)
    assert parameters(narrow) == (
        (25 * 3 * 8 + 8) + (25 * 8 * 8 + 8) + (36 * 8 * 48 + 48) + (48 * 24 + 24) + (24 * 10 + 10)
    )
    assert narrow(torch.zeros(2, 3, 24, 24)).shape == (2, 10)


def test_small_cnn_size() -> None:
    """5x5x16, 5x5x32 and one linear layer on 28x28."""
    assert parameters(small_cnn((1, 28, 28), 10)) == (25 * 16 + 16) + (25 * 16 * 32 + 32) + (7 * 7 * 32 * 10 + 10)


@pytest.mark.parametrize("name", sorted(NETWORKS.keys() - {"brain_age_cnn3d"}))  # which takes volumes
@pytest.mark.parametrize("shape", [(3, 24, 24), (1, 8, 8), (3, 32, 32)])
def test_every_network_takes_images_of_any_size(name: str, shape: tuple[int, ...]) -> None:
    """Built from the shape of an example and the number of outputs."""
    assert NETWORKS[name](shape, 7)(torch.zeros(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("name", ["small_cnn", "cifar10_cnn"])
def test_convolutions_need_images(name: str) -> None:
    """A table of features, or an image that vanishes in the pooling, is refused by name."""
    with pytest.raises(ConfigError, match=f"{name} needs images of shape"):
        NETWORKS[name]((64,), 10)
    with pytest.raises(ConfigError, match="too small"):
        NETWORKS[name]((1, 1, 1), 10)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(("network", "shape"), [(cifar10_cnn, (3, 24, 24)), (femnist_cnn, (1, 28, 28))])
def test_pooling_before_relu_gives_the_bits_of_the_papers_order(
    network: Callable[..., nn.Module], shape: tuple[int, ...], low: bool
) -> None:
    def trained(order: Sequence[int]) -> Tensor:
        torch.manual_seed(1)
        layers = list(network(shape, 10, width=8).children())
        module = nn.Sequential(*(layers[place] for place in order), *layers[3:])
        solver = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(5):
            inputs = torch.randn(20, *shape).contiguous(memory_format=torch.channels_last)
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                loss = nn.functional.cross_entropy(module(inputs), torch.randint(10, (20,)))
            solver.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            solver.step()
        return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    assert torch.equal(trained([0, 1, 2]), trained([0, 2, 1]))
