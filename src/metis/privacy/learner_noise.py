"""Differential privacy of whole learners, for large federations: updates are clipped and carry shares of the noise.

No single learner's share protects it; those of all honest learners in a sum do, and with a secure sum nobody sees less.
Each share is scaled for the honest learners that a sum has at least, however many drop out.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from metis.errors import ConfigError
from metis.privacy.chance import Chance


def share_of_noise(noise: float, least: int, colluding: int) -> float:
    """Standard deviation of one learner's noise over the clip, so that the honest ones of a sum add up to `noise`."""
    honest = least - colluding
    if honest < 1:
        raise ConfigError(f"of {least} learners in a sum, {colluding} collude; at least one must be honest")
    return noise / math.sqrt(honest)


def clipped(update: NDArray[np.float32], clip: float) -> NDArray[np.float32]:
    """The change of a model, no longer than the clip; one that is not finite is nothing."""
    norm = float(np.linalg.norm(update.astype(np.float64)))
    if not math.isfinite(norm):
        return np.zeros_like(update)
    scaled: NDArray[np.float32] = update * np.float32(min(1.0, clip / max(norm, 1e-12)))
    return scaled


def add_noise(update: NDArray[np.float32], clip: float, share: float, chance: Chance) -> NDArray[np.float32]:
    """A clipped update with its share of the noise, where models are mixed as they are."""
    noise = chance.normal(update.size).reshape(update.shape) * (share * clip)
    return clipped(update, clip) + noise.astype(np.float32)


def add_ring_noise(
    words: NDArray[np.int64], clip_in_units: float, share: float, bits: int, chance: Chance
) -> NDArray[np.int64]:
    """Whole numbers of a ring with their share of noise, modulo 2^bits; `clip_in_units` is the clip as the ring counts.

    Sums of discrete Gaussians are close to one (Kairouz et al. 2021), and no rounding undoes the guarantee.
    """
    noisy = words + discrete_gaussian(share * clip_in_units, words.size, chance).reshape(words.shape)
    return noisy if bits >= 64 else noisy & ((1 << bits) - 1)


def discrete_gaussian(deviation: float, count: int, chance: Chance) -> NDArray[np.int64]:
    """Whole numbers with probabilities proportional to exp(-x^2 / 2 deviation^2): Canonne, Kamath and Steinke 2020.

    By rejection from a two-sided geometric distribution.
    """
    if deviation <= 0:
        return np.zeros(count, np.int64)
    scale = math.floor(deviation) + 1
    found: list[NDArray[np.int64]] = []
    missing = count
    while missing > 0:
        tried = 2 * missing + 16
        sizes = np.floor(-scale * np.log1p(-chance.uniform(tried))).astype(np.int64)
        negative = chance.uniform(tried) < 0.5
        distance = np.abs(sizes) - deviation * deviation / scale
        kept = chance.uniform(tried) < np.exp(-(distance**2) / (2 * deviation * deviation))
        kept &= ~(negative & (sizes == 0))  # zero would be drawn with either sign
        signed = np.where(negative, -sizes, sizes)[kept][:missing]
        found.append(signed)
        missing -= len(signed)
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def noise_over_clip(noise: float, parameters: int) -> float:
    """How long the noise of a sum is, in clips: with ten hospitals it drowns whatever they have learned."""
    return noise * math.sqrt(parameters)
