"""Local data in place of what Flower's examples download: the digits that scikit-learn has, enlarged; iris; a table."""

import numpy as np


def digits(shape, image):
    """Real handwritten digits as images of this shape."""
    from sklearn.datasets import load_digits

    found = load_digits()
    small = (found.images * 15.9).astype(np.uint8)
    large = small.repeat(4, axis=1).repeat(4, axis=2)[:, :, :]
    pad, crop = max(0, shape[0] - 32) // 2, max(0, 32 - shape[0]) // 2
    large = np.pad(large, ((0, 0), (pad, pad), (pad, pad)))[:, crop : crop + shape[0], crop : crop + shape[0]]
    if len(shape) == 3:
        large = np.stack([large] * 3, axis=-1)
    order = np.random.default_rng(0).permutation(len(large))
    return {image: list(large[order]), "label": [int(label) for label in found.target[order]]}


def iris(_shape, _image):
    from sklearn.datasets import load_iris

    found = load_iris()
    order = np.random.default_rng(0).permutation(len(found.data))
    names = ["sepal_length", "sepal_width", "petal_length", "petal_width"]
    columns = {name: found.data[order, index].tolist() for index, name in enumerate(names)}
    return {**columns, "species": found.target[order].tolist()}


def income(_shape, _image):
    """A table of the shape of Adult Census Income: 14 columns of features, 8 of them words."""
    rng = np.random.default_rng(0)
    latent = rng.normal(size=(1200, 14))
    words = [0, 1, 2, 3, 4, 5, 6, 7]
    columns = {}
    for index in range(14):
        values = latent[:, index]
        if index in words:
            columns[f"word{index}"] = [f"w{int(value)}" for value in np.digitize(values, [-1, 0, 1])]
        else:
            columns[f"number{index}"] = values.tolist()
    labels = latent[:, 8:].sum(axis=1) + 0.5 * latent[:, 0] > 0
    return {**columns, "income": ["<=50K" if label else ">50K" for label in labels]}


SETS = {
    "uoft-cs/cifar10": (digits, (32, 32, 3), "img"),
    "ylecun/mnist": (digits, (28, 28), "image"),
    "zalando-datasets/fashion_mnist": (digits, (28, 28), "image"),
    "hitorilabs/iris": (iris, (), ""),
    "scikit-learn/adult-census-income": (income, (), ""),
}


def columns_of(path, examples=400):
    """The splits of a data set that an example would download."""
    make, shape, image = SETS[path]
    columns = make(shape, image)
    whole = len(next(iter(columns.values())))
    count = min(examples, int(0.8 * whole))
    return {
        "train": {name: values[:count] for name, values in columns.items()},
        "test": {name: values[count : count + 200] for name, values in columns.items()},
    }
