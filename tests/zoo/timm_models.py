"""Small timm models with random weights, on small images."""

from __future__ import annotations

from functools import partial
from typing import Any

from entry import Entry

#: Name: image size, and what else ``timm.create_model`` gets.
_MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet18": (32, {}),
    "vit_tiny_patch16_224": (32, {"img_size": 32, "depth": 2}),
    "convnext_atto": (32, {}),
}


def _build(name: str, size: int, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    import timm
    import torch

    model = timm.create_model(name, pretrained=False, num_classes=10, **arguments)
    return model, {"x": torch.randn(2, 3, size, size)}


TIMM = [
    Entry(f"timm/{name}", "timm", partial(_build, name, *arguments))
    for name, arguments in _MODELS.items()
]
