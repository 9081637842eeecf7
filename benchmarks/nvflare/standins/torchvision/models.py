"""Empty: Lightning and torchmetrics look whether it is there."""
