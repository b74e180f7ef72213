# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Lets CUDA builds of torchvision and torchaudio be imported beside a CPU torch.

Both packages load a compiled extension when they are imported, and PyPI's wheels of both
are linked against CUDA. Their Python parts work without it. Imported by a ``.pth`` file
at interpreter start, this module costs nothing until one of them is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def _define_torchvision_operators() -> None:
    """Declare the two operators that torchvision registers fakes for on import."""
    import torch

    global _torchvision_library
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in (
        ("nms", "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"),
        ("qnms", "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"),
    ):
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    # Dropping the library would drop its definitions.
    _torchvision_library = library


def _tolerate_missing_torchaudio_extension(module: ModuleType) -> None:
    """Let torchaudio go on without its extension, as it does when built without one."""
    load = module._load_lib

    def load_if_possible(lib: str) -> bool:
        try:
            return bool(load(lib))
        except OSError:
            return False

    module._load_lib = load_if_possible  # type: ignore[attr-defined]


_BEFORE: dict[str, Callable[[], None]] = {
    "torchvision._meta_registrations": _define_torchvision_operators,
}
_AFTER: dict[str, Callable[[ModuleType], None]] = {
    "torchaudio._extension.utils": _tolerate_missing_torchaudio_extension,
}


class _Loader(importlib.machinery.SourceFileLoader):
    """Runs the module as usual, with our step before or after it."""

    def exec_module(self, module: ModuleType) -> None:
        if before := _BEFORE.get(module.__name__):
            before()
        super().exec_module(module)
        if after := _AFTER.get(module.__name__):
            after(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the few modules named above; every other import passes it by."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _BEFORE and fullname not in _AFTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, _Finder())
