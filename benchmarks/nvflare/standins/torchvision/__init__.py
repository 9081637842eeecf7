"""The parts of torchvision that NVFlare's quickstarts use, where it cannot be installed; CIFAR-10 is digits here."""

from torchvision import datasets, transforms

__all__ = ["datasets", "transforms"]
