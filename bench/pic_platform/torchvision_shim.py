"""Lets `import torchvision` pass beside a CPU build of torch, where the registry has only torchvision's CUDA build.

That build's operator library cannot be loaded without CUDA's libraries, and `import torchvision` then stops at
`operator torchvision::nms does not exist`. Nothing that a language model needs uses these operators: SGLang and
transformers import torchvision for image transforms only. Declaring the two schemas with no implementation is enough
for the import to pass; a call of them still fails, as it should.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CUDA_BUILD = re.compile(r"__version__\s*=\s*['\"][^'\"]*\+cu\d+")
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def is_needed() -> bool:
    """Whether torch is a CPU build and torchvision a CUDA build; reads torchvision's version file only."""
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return False
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return version.is_file() and _CUDA_BUILD.search(version.read_text(encoding="utf-8")) is not None


def install() -> None:
    """Declare the missing operators if they are needed and not there yet; idempotent."""
    if is_needed():
        _declare()


@cache
def _declare() -> torch.library.Library | None:
    """Declare the schemas once; the cache keeps the library object, without which they would vanish."""
    import torch

    if hasattr(torch.ops.torchvision, "nms"):
        return None
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    return library
