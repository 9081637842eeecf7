"""A MONAI bundle as a site: network, loss and data come from the bundle's own configuration."""

from pathlib import Path

from monai.bundle import ConfigParser

CONFIG = Path(__file__).parent / "bundle" / "configs" / "train.json"


def parsed(key):
    parser = ConfigParser()
    parser.read_config(str(CONFIG))
    return parser.get_parsed_content(key)


def network():
    return parsed("network_def")


loss = parsed("train#loss")
metric, metrics = "dice", ["dice"]


def training_data(site):
    return [(item["image"], item["label"]) for item in parsed("train#dataset")]


def evaluation_data(site):
    return [(item["image"], item["label"]) for item in parsed("validate#dataset")]
