"""What short programs need that autopar imports late (launched.py, torchruns.py): without transformers, which ranks of
tests need, too (preloaded.py)."""

import torch
import torch._export.non_strict_utils
import torch._functorch.aot_autograd
import torch._functorch.partitioners
import torch.distributed.tensor
import torch.export._leakage_detection_utils
import torch.export._trace
import torch.export._unlift
import torch.utils._sympy.reference

import autopar.runtime.module
import autopar.runtime.ranks.planning  # noqa: F401

torch.set_num_threads(1)
