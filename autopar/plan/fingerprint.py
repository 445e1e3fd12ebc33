"""The fingerprint of a model, names and shapes of its parameters, by which a plan for another model is refused.

It does not use the captured graph, which differs with training mode, batch size and torch version. It leaves out dtype
and device: a plan made in float32 is also valid in bfloat16.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict

from torch import nn
from torch.nn.parameter import UninitializedParameter

from autopar.errors.names import few

_NONE = "no parameters"
_MOST = 3  # parameters in a message
_DIGITS = 8


def fingerprint(model: nn.Module) -> str:
    """`conv1:0f4b5c1d layer1:9a0b3c2e`: a hash per child of the model, with an empty name for the model's own
    parameters. Children that hold uninitialized lazy parameters are left out."""
    return " ".join(f"{name}:{digest}" for name, digest in _digests(model).items() if digest) or _NONE


def differences(recorded: str, model: nn.Module) -> list[str]:
    """How `model` differs from the model with the fingerprint `recorded`; empty if it does not."""
    then = dict(re.findall(rf"(\S*):([0-9a-f]{{{_DIGITS}}})(?: |$)", recorded))
    now = _digests(model)
    lost = [name for name in then if name not in now]
    new = [name for name in now if name not in then and now[name]]
    changed = [name for name in then if now.get(name) and now[name] != then[name]]
    texts = []
    if lost:
        texts.append(f"it has no parameters in {few(lost)}")
    if new:
        texts.append(f"it has parameters in {few(new)}, which the other model does not have")
    if changed:
        shapes = [f"{name} {tuple(p.shape)}" for name, p in model.named_parameters() if _child(name) == changed[0]]
        texts.append(f"parameters in {few(changed)} have other names or shapes, here {', '.join(shapes[:_MOST])} ...")
    return texts


def _digests(model: nn.Module) -> dict[str, str | None]:
    """A hash per child with parameters; None where shapes are not known yet."""
    lines: dict[str, list[str]] = defaultdict(list)
    lazy = set()
    for name, parameter in sorted(model.named_parameters(remove_duplicate=False)):
        child = _child(name)
        if isinstance(parameter, UninitializedParameter):
            lazy.add(child)
        else:
            lines[child].append(f"{name} {tuple(parameter.shape)}")
    digests: dict[str, str | None] = {
        child: hashlib.sha256("\n".join(text).encode()).hexdigest()[:_DIGITS] for child, text in lines.items()
    }
    return digests | dict.fromkeys(lazy)


def _child(name: str) -> str:
    """The child of the root that holds a parameter, "" for the root itself."""
    return re.sub(r"\s", "_", name.partition(".")[0]) if "." in name else ""
