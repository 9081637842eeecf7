"""The few transforms that Flower's examples use, where torchvision cannot be installed."""
