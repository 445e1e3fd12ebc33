"""What a model repeats: the items of its outermost module lists.

GPT-2        transformer.h.0 .. transformer.h.11
T5           encoder.block.0 .. encoder.block.5, decoder.block.0 .. decoder.block.5
ResNet-50    layer1.0 .. layer4.2
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_FEWEST = 2  # equal modules in a row that count as layers


def repeated_layers(model: nn.Module) -> tuple[str, ...]:
    """Paths of the outermost modules that stand in a list with others of their class and with parameters."""
    return tuple(_repeated(model, ""))


def _repeated(module: nn.Module, path: str) -> Iterator[str]:
    children = [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
    numbered = [(name, child) for name, child in children if name.isdecimal()]
    classes = {type(child) for _, child in numbered}
    is_list = len(numbered) >= _FEWEST and len(classes) == 1 and not isinstance(numbered[0][1], nn.Sequential)
    for name, child in children:
        own = f"{path}.{name}" if path else name
        if is_list and name.isdecimal():
            yield own
        else:
            yield from _repeated(child, own)
