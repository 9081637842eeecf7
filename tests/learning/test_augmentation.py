"""Augmentation: batched, drawn from the generator that it is given, and true to the image."""

import pickle
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from metis.errors import ConfigError
from metis.learning import (
    centre_crop,
    cifar_tutorial,
    compose,
    horizontal_flip,
    random_contrast,
    random_crop,
    standardize,
)


def images(count: int = 12, channels: int = 3, height: int = 9, width: int = 11) -> Tensor:
    """Every number differs from every other."""
    numbers = torch.arange(count * height * width * channels, dtype=torch.float32)
    return numbers.view(count, height, width, channels).permute(0, 3, 1, 2)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def windows(image: Tensor, size: int) -> list[Tensor]:
    _, height, width = image.shape
    corners = product(range(height - size + 1), range(width - size + 1))
    return [image[:, top : top + size, left : left + size] for top, left in corners]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("contiguous", [False, True])
def test_a_random_crop_is_a_window_of_its_own_image(channels: int, contiguous: bool) -> None:
    """For both memory formats; and the windows of a batch are not all at the same position."""
    batch = images(40, channels)
    batch = batch.contiguous() if contiguous else batch
    cropped = random_crop(6)(batch, generator())
    assert cropped.shape == (40, channels, 6, 6)
    positions = []
    for image, crop in zip(batch, cropped, strict=True):
        found = [position for position, window in enumerate(windows(image, 6)) if torch.equal(window, crop)]
        assert len(found) == 1
        positions += found
    assert len(set(positions)) > 10


def test_a_crop_of_the_whole_image_is_the_image() -> None:
    """The last window of the last image ends with the last number."""
    square = images(height=9, width=9)
    assert torch.equal(random_crop(9)(square, generator()), square)


def test_padding_lets_the_window_leave_the_image() -> None:
    """With a border of zeros, a crop is a window of the padded image."""
    batch = images(30) + 1
    padded = torch.nn.functional.pad(batch, (2, 2, 2, 2))
    cropped = random_crop(9, padding=2)(batch, generator())
    for image, crop in zip(padded, cropped, strict=True):
        assert any(torch.equal(window, crop) for window in windows(image, 9))
    assert (cropped == 0).any()


def test_a_flip_mirrors_some_images_and_leaves_the_others() -> None:
    """Left to right, channels in place; the batch that was given is not changed."""
    batch = images(60)
    before = batch.clone()
    flipped = horizontal_flip()(batch, generator())
    mirrored = [torch.equal(new, old.flip(2)) for new, old in zip(flipped, batch, strict=True)]
    kept = [torch.equal(new, old) for new, old in zip(flipped, batch, strict=True)]
    assert all(m != k for m, k in zip(mirrored, kept, strict=True))
    assert 10 < sum(mirrored) < 50
    assert torch.equal(batch, before)
    assert torch.equal(horizontal_flip(1.0)(batch, generator()), batch.flip(3))
    assert torch.equal(horizontal_flip(0.0)(batch, generator()), batch)


def test_the_generator_rules_the_draw() -> None:
    """The same seed gives the same batch, another seed another; torch's global generator is not touched."""
    augment = compose(random_crop(6, padding=1), horizontal_flip())
    state = torch.get_rng_state()
    one, same, other = (augment(images(), generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_centre_crop_is_the_middle_window() -> None:
    """(9 - 5) // 2 rows above, (11 - 5) // 2 columns to the left."""
    batch = images()
    assert torch.equal(centre_crop(5)(batch), batch[:, :, 2:7, 3:8])


def test_standardize_is_tensorflows() -> None:
    """(x - mean) / max(deviation, 1 / sqrt(numbers)) for each image; one colour becomes zero, not NaN."""
    batch = torch.rand(4, 3, 5, 6, generator=generator())
    batch[1] = 0.5
    array = batch.numpy().astype(np.float64)
    mean, deviation = array.mean((1, 2, 3)), array.std((1, 2, 3))
    floor = 1 / np.sqrt(3 * 5 * 6)
    expected = (array - mean[:, None, None, None]) / np.maximum(deviation, floor)[:, None, None, None]
    assert standardize()(batch).numpy() == pytest.approx(expected, abs=1e-5)


def test_contrast_works_on_each_channel_and_is_not_undone_by_standardizing() -> None:
    """TensorFlow's: (x - mean of the channel) * factor + mean; a shift of a whole image would be undone."""
    batch = images().float()
    changed = random_contrast(0.2, 1.8)(batch, generator())
    mean = batch.mean((2, 3), keepdim=True)
    factor = ((changed - mean) * (batch - mean)).sum((1, 2, 3)) / (batch - mean).square().sum((1, 2, 3))
    assert torch.allclose(changed, mean + factor[:, None, None, None] * (batch - mean), atol=1e-4)
    assert 0.2 <= float(factor.min()) < float(factor.max()) <= 1.8
    assert torch.allclose(random_contrast(1.0, 1.0)(batch, generator()), batch, atol=1e-4)
    tinted = batch + torch.tensor([0.0, 2.0, 4.0])[None, :, None, None]
    plain, less = standardize()(tinted), standardize()(random_contrast(0.2, 0.2)(tinted, generator()))
    assert float((plain - less).square().mean().sqrt()) > 0.1
    assert torch.allclose(standardize()(tinted + 5.0), plain, atol=1e-4)


def test_results_lie_channels_last_in_memory() -> None:
    """So that the engine need not copy them."""
    batch = images(height=32, width=32)
    training, evaluation = cifar_tutorial()
    for result in (training(batch, generator()), evaluation(batch)):
        assert result.shape == (12, 3, 24, 24)
        assert result.is_contiguous(memory_format=torch.channels_last)


def test_operations_can_be_sent_to_a_worker() -> None:
    """A pickled operation does the same."""
    training, _ = cifar_tutorial(5)
    again = pickle.loads(pickle.dumps(training))
    assert torch.equal(again(images(), generator(3)), training(images(), generator(3)))


def test_mistakes_are_named() -> None:
    """A window that does not fit, inputs that are no images, drawing without a generator."""
    with pytest.raises(ConfigError, match="window of 10 x 10 does not fit in images of 9 x 11"):
        random_crop(10)(images(), generator())
    with pytest.raises(ConfigError, match="horizontal_flip needs images"):
        horizontal_flip()(torch.zeros(4, 5), generator())
    with pytest.raises(ConfigError, match="random_crop draws and needs a generator"):
        compose(random_crop(4))(images())
    with pytest.raises(ConfigError, match="lower must be at least 0 and not above upper"):
        random_contrast(1.0, 0.5)
    with pytest.raises(ConfigError, match="probability must be between 0 and 1"):
        horizontal_flip(2.0)
    with pytest.raises(ConfigError, match="size must be at least 1"):
        random_crop(0)
