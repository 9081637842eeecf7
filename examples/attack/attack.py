"""What a curious controller learns about one site's patients from that site's update: in the clear, masked, noised.

    METIS_DATA=FOLDER python examples/attack/attack.py [--quick] [--out FOLDER]

Two attacks by all that the controller has: the community model that it sent, and what came back.

- Model inversion: one step on a batch. Where a unit of the first layer saw a single image of the batch, the change of
  its weights over the change of its bias IS that image (the linear-layer leak; "Robbing the Fed", Fowl et al. 2022,
  crafts models in which every unit does). The error is the mean square over the pixels of each image and its best copy,
  over that of an all-grey guess: 0 is a perfect copy, 1 is nothing.
- Membership inference: a few epochs of local training. An image was the site's if the model has become surer of it
  than of images that are known not to be (the difference of log-odds); counted are true positives at 0.1 % and 1 %
  false positives.

"masked" is the update as the controller receives it under a secure sum: the words of `metis.core.ring`, to which the
masks of `metis.privacy.masks` are added. The attacker reads them as well as it can, as numbers. "noised" is DP-SGD at
the site, in the clear otherwise. MNIST and CIFAR-10 from METIS_DATA, or the bundled digits.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import metis
from metis.core.model import Model
from metis.core.ring import Ring
from metis.learning import Learner, TorchEngine, as_examples, mlp
from metis.privacy.masks import mask
from metis.privacy.records import Privacy

NOISE = 8.0  # of the membership attack
VIEWS = ("clear", "masked", "noised")
Images = NDArray[np.float32]


def load(wanted: str) -> tuple[str, Images, NDArray[Any], Images, NDArray[Any]]:
    """The images of this data set if it is there, with pixels from 0 to 1."""
    folder = os.environ.get("METIS_DATA")
    name = wanted if folder and (Path(folder) / f"{wanted}.npz").exists() else "digits"
    data = metis.load_dataset(name)
    most = np.float32(max(1.0, float(data.x_train.max())))
    return name, data.x_train / most, data.y_train, data.x_test / most, data.y_test


def trained(
    engine: TorchEngine, x: Images, y: NDArray[Any], start: Model, batch: int, steps: int, rate: float, noise: float
) -> Model:
    """What one site makes of the community model; with noise, by DP-SGD, here with draws that can be repeated."""
    privacy = Privacy(noise=noise, clip=1.0) if noise else None
    learner = Learner(
        "site", 0, as_examples((x, y)), np.arange(len(y)), batch, metis.VanillaSGD(rate), seed=1, privacy=privacy
    )
    return learner.train(engine, start, 0, steps).model


def received(local: Model, start: Model) -> Model:
    """A masked update, read as numbers by a controller without the other masks."""
    ring = Ring(32, 10, clip=1.0)
    body = ring.quantize(local, start, 1.0, 1.0, (0.0,) * ring.scalars).body
    sections = ring.sections(local.layout)
    mask(body, sections, [os.urandom(32)], [os.urandom(32)])
    vector = start.vector.copy()
    for section in sections:
        words = section.view(body)[section.leading :]
        signed = words.astype(f"u{section.bits // 8}").view(f"i{section.bits // 8}").astype(np.float64)
        done = 0
        for part in section.parts:
            count = part.stop - part.start
            vector[part] += (signed[done : done + count] / 2.0 ** (section.bits - 1)).astype(np.float32)
            done += count
    return local.with_vector(vector)


def view(kind: str, engine: TorchEngine, start: Model, x: Images, y: NDArray[Any], noise: float, **how: Any) -> Model:
    """What the controller has of this site's update."""
    local = trained(engine, x, y, start, noise=noise if kind == "noised" else 0.0, **how)
    return received(local, start) if kind == "masked" else local


def invert(start: Model, update: Model) -> Images:
    """Every image that a unit of the first layer shows: the change of its weights over that of its bias."""
    names = [spec.name for spec in start.layout.tensors][:2]
    shape = start.layout.tensors[0].shape
    weight, bias = ((update.vector - start.vector)[start.layout.slices[name]] for name in names)
    moved = np.abs(bias) > 1e-12
    copies: Images = weight.reshape(shape)[moved] / bias[moved, np.newaxis]
    return copies


def error(image: Images, copies: Images) -> tuple[float, Images]:
    """Of the best copy, over that of a grey guess; and the copy."""
    flat = image.reshape(-1)
    if not len(copies):
        return 1.0, np.full_like(flat, flat.mean())
    apart = np.square(np.clip(copies, 0, 1) - flat).mean(axis=1)
    best = int(apart.argmin())
    return float(apart[best] / np.square(flat - flat.mean()).mean()), np.clip(copies[best], 0, 1)


def log_odds(module: Any, model: Model, x: Images, y: NDArray[Any]) -> NDArray[np.float64]:
    """How sure the model is of each image's own class, on a scale that does not end at certainty."""
    module.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in model.tensors().items()})
    with torch.no_grad():
        scores = module(torch.from_numpy(x)).double().numpy()
    own = scores[np.arange(len(y)), y]
    scores[np.arange(len(y)), y] = -np.inf
    most = scores.max(axis=1)
    return np.asarray(own - most - np.log(np.exp(scores - most[:, np.newaxis]).sum(axis=1)))


def true_positives(members: NDArray[np.float64], others: NDArray[np.float64], share: float) -> float:
    """How many members score above all but this share of the others."""
    ranked = np.sort(others)[::-1]
    allowed = int(share * len(ranked))
    return float((members > ranked[min(allowed, len(ranked) - 1)]).mean())


def area(members: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """Of the ROC curve: how often a member scores above another; 0.5 is a coin."""
    ranked = np.sort(others)
    below = np.searchsorted(ranked, members, "left") + np.searchsorted(ranked, members, "right")
    return float(below.mean() / 2 / len(ranked))


class Site:
    """One site's images, its network, and images that everybody has."""

    def __init__(self, wanted: str) -> None:
        torch.manual_seed(1)
        torch.set_num_threads(1)
        self.name, x, y, self.x_test, self.y_test = load(wanted)
        order = np.random.default_rng(5).permutation(len(y))[:4000]
        self.x, self.y = x[order].astype(np.float32), y[order]
        self.x_test = self.x_test.astype(np.float32)
        shape = tuple(x.shape[1:])
        self.module = mlp(shape, 10, hidden=(128,))
        self.engine = TorchEngine(network=lambda: mlp(shape, 10, hidden=(128,)), task="classification")
        self.start = self.engine.initial_model(7)


def inversion() -> tuple[dict[str, Any], dict[str, Images]]:
    """What one step on eight images shows, in each view: errors, and the copies for the figure."""
    site = Site("mnist")
    batch, labels = site.x[:8], site.y[:8]
    numbers: dict[str, Any] = {"data": site.name}
    pictures: dict[str, Images] = {"original": batch.reshape(8, -1)}
    for kind in VIEWS:
        update = view(kind, site.engine, site.start, batch, labels, noise=1.0, batch=8, steps=1, rate=0.1)
        found = [error(image, invert(site.start, update)) for image in batch]
        pictures[kind] = np.stack([copy for _, copy in found])
        numbers[kind] = round(float(np.mean([value for value, _ in found])), 3)
    return numbers, pictures


def membership(quick: bool) -> dict[str, Any]:
    """Who was among the site's images, in each view."""
    site = Site("cifar10")
    size, others, steps = (50, 300, 800) if quick else (100, 2000, 3000)
    warm = trained(site.engine, site.x[1000:], site.y[1000:], site.start, 50, 60, 0.05, 0.0)
    people = (site.x[:size], site.y[:size]), (site.x_test[:others], site.y_test[:others])
    numbers: dict[str, Any] = {"data": site.name}
    for kind in VIEWS:
        update = view(kind, site.engine, warm, *people[0], noise=NOISE, batch=20, steps=steps, rate=0.05)
        members, strangers = (
            log_odds(site.module, update, x, y) - log_odds(site.module, warm, x, y) for x, y in people
        )
        numbers[kind] = {
            "true positives at 0.1 %": round(true_positives(members, strangers, 0.001), 3),
            "at 1 %": round(true_positives(members, strangers, 0.01), 3),
            "area": round(area(members, strangers), 3),
        }
    return numbers


def figure(pictures: dict[str, Images], path: Path) -> None:
    """A row for each view: the images, and the best copies of them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    side = round(pictures["original"].shape[1] ** 0.5)
    labels = {"original": "the site's images", "clear": "copies, in the clear", "masked": "masked", "noised": "noised"}
    drawn, axes = plt.subplots(4, 8, figsize=(8, 4.2))
    for row, (kind, label) in enumerate(labels.items()):
        for column in range(8):
            axes[row, column].imshow(pictures[kind][column].reshape(side, side), cmap="gray", vmin=0, vmax=1)
            axes[row, column].set_xticks([])
            axes[row, column].set_yticks([])
        axes[row, 0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
    drawn.tight_layout()
    drawn.savefig(path, dpi=110)
    plt.close(drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few images: some seconds")
    parser.add_argument("--out", type=Path, help="folder for results.json and attack.png")
    arguments = parser.parse_args()
    errors, pictures = inversion()
    numbers = {"inversion": errors, "membership": membership(arguments.quick)}
    sys.stdout.write(json.dumps(numbers, indent=1) + "\n")
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "results.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
        figure(pictures, arguments.out / "attack.png")


if __name__ == "__main__":
    main()
