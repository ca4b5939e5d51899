"""The probe sees every kind of weights that arrive wrong, by a real engine and each transport of a CPU."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine.corruptions import CORRUPTIONS
