"""MedMNIST v2 (Yang et al. 2023): ten sets of small medical images with one label each, in their published splits.

Their files are read as they are, without the package `medmnist`; its validation images are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ADDRESS = "https://zenodo.org/records/6496656/files/{}.npz"
_ORGANS = (
    "bladder", "left femur", "right femur", "heart", "left kidney", "right kidney", "liver", "left lung", "right lung",
    "pancreas", "spleen",
)  # fmt: skip


class MedMnist(NamedTuple):
    """One of the sets, as published."""

    title: str
    class_names: tuple[str, ...]
    channels: int
    train: int
    test: int
    md5: str


SETS = {
    "pathmnist": MedMnist(
        "PathMNIST (colon tissue)",
        ("adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle", "normal colon mucosa",
         "cancer-associated stroma", "colorectal adenocarcinoma epithelium"),
        3, 89_996, 7_180, "a8b06965200029087d5bd730944a56c1",
    ),
    "dermamnist": MedMnist(
        "DermaMNIST (skin lesions)",
        ("actinic keratoses", "basal cell carcinoma", "benign keratosis", "dermatofibroma", "melanoma",
         "melanocytic nevi", "vascular lesions"),
        3, 7_007, 2_005, "0744692d530f8e62ec473284d019b0c7",
    ),
    "octmnist": MedMnist(
        "OCTMNIST (retina, tomography)",
        ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
        1, 97_477, 1_000, "c68d92d5b585d8d81f7112f81e2d0842",
    ),
    "pneumoniamnist": MedMnist(
        "PneumoniaMNIST (chest, children)", ("normal", "pneumonia"),
        1, 4_708, 624, "28209eda62fecd6e6a2d98b1501bb15f",
    ),
    "breastmnist": MedMnist(
        "BreastMNIST (ultrasound)", ("malignant", "normal or benign"),
        1, 546, 156, "750601b1f35ba3300ea97c75c52ff8f6",
    ),
    "bloodmnist": MedMnist(
        "BloodMNIST (blood cells)",
        ("basophil", "eosinophil", "erythroblast", "immature granulocytes", "lymphocyte", "monocyte", "neutrophil",
         "platelet"),
        3, 11_959, 3_421, "7053d0359d879ad8a5505303e11de1dc",
    ),
    "tissuemnist": MedMnist(
        "TissueMNIST (kidney cells)",
        ("collecting duct", "distal convoluted tubule", "glomerular endothelial cells",
         "interstitial endothelial cells", "leukocytes", "podocytes", "proximal tubule segments",
         "thick ascending limb"),
        1, 165_466, 47_280, "ebe78ee8b05294063de985d821c1c34b",
    ),
    "organamnist": MedMnist(
        "OrganAMNIST (organs, axial)", _ORGANS, 1, 34_581, 17_778, "866b832ed4eeba67bfb9edee1d5544e6"
    ),
    "organcmnist": MedMnist(
        "OrganCMNIST (organs, coronal)", _ORGANS, 1, 13_000, 8_268, "0afa5834fb105f7705a7d93372119a21"
    ),
    "organsmnist": MedMnist(
        "OrganSMNIST (organs, sagittal)", _ORGANS, 1, 13_940, 8_829, "e5c39f1af030238290b9557d9503af9d"
    ),
}  # fmt: skip


def from_archive(stored: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The arrays of a MedMNIST file under the names of ours; labels come as a column."""
    arrays = {}
    for split in ("train", "test"):
        labels = np.asarray(stored[f"{split}_labels"])
        arrays[f"x_{split}"] = np.asarray(stored[f"{split}_images"])
        arrays[f"y_{split}"] = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    return arrays
