"""One torch thread: tests share the machine, and two threads would fight over it."""

import torch

torch.set_num_threads(1)
