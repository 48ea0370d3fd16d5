"""Names of a package that are imported at their first use (PEP 562): a program loads only what it uses."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of ``package``.

    ``modules`` has the module of each name, whole or from the package on (``".pages"``). The package's ``__all__`` is
    what ``dir`` answers. A name that ``modules`` does not have raises :class:`AttributeError`.
    """

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sys.modules[package].__all__
