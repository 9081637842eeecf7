"""What each site of the federation brings: the same file at every site, at the controller and in a rehearsal.

    metis simulate examples/site/federation.toml          all sites played on this machine
    metis learner --site examples/site/site.py ...        one real site

Metis calls these functions with the learner's name, which is the name in the site's certificate.
"""

import numpy as np
from torch import nn

import metis

SITES = ("north", "east", "south", "west")


def network() -> nn.Module:
    """The same at all sites: nothing that depends on the data of one of them."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def records(site: str) -> tuple[np.ndarray, np.ndarray]:
    """A real site reads its own files here. This one takes every fourth of the bundled digits."""
    if site not in SITES:
        raise ValueError(f"there is no site '{site}'; there are {', '.join(SITES)}")
    digits = metis.load_dataset("digits")
    own = slice(SITES.index(site), None, len(SITES))
    return digits.x_train[own] / np.float32(16), digits.y_train[own]


def training_data(site: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets; a map-style dataset of torch would do as well."""
    inputs, targets = records(site)
    return inputs[50:], targets[50:]


def evaluation_data(site: str) -> tuple[np.ndarray, np.ndarray]:
    """What this site measures community models on; it never leaves the site. May be left out."""
    inputs, targets = records(site)
    return inputs[:50], targets[:50]


def test_data() -> tuple[np.ndarray, np.ndarray]:
    """What the controller measures community models on, if it has data of its own. May be left out."""
    digits = metis.load_dataset("digits")
    return digits.x_test / np.float32(16), digits.y_test
