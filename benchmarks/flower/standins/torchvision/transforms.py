"""Transforms of single images: PIL images or arrays [height, width(, channels)] of bytes."""

import numpy as np
import torch


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor:
    def __call__(self, image):
        array = np.array(image)
        array = array[:, :, None] if array.ndim == 2 else array
        return torch.from_numpy(array.copy()).permute(2, 0, 1).float() / 255


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def __call__(self, tensor):
        return (tensor - self.mean) / self.std


class RandomHorizontalFlip:
    def __call__(self, image):
        return np.array(image)[:, ::-1].copy() if torch.rand(()) < 0.5 else image


class RandomCrop:
    def __init__(self, size, padding=0):
        self.size, self.padding = size, padding

    def __call__(self, image):
        array = np.array(image)
        edges = [(self.padding, self.padding)] * 2 + [(0, 0)] * (array.ndim - 2)
        array = np.pad(array, edges)
        top, left = (int(torch.randint(0, side - self.size + 1, ())) for side in array.shape[:2])
        return array[top : top + self.size, left : left + self.size]


class functional:
    @staticmethod
    def to_tensor(image):
        return ToTensor()(image)
