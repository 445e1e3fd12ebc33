"""What the process imports that others are forked from (forked.py): what ranks need, and what torch.export imports when
it is first called."""

import rank_cases  # noqa: F401
import torch._export.non_strict_utils
import torch._functorch.aot_autograd
import torch._functorch.partitioners
import torch.export._leakage_detection_utils
import torch.export._trace
import torch.export._unlift
import torch.utils._sympy.reference  # noqa: F401
