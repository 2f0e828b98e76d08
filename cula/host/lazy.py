"""Lazy doors (PEP 562): a package names its public objects and imports them at first use."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any


def attach(
    package: str,
    names: Mapping[str, str],
    *,
    submodules: Iterable[str] = (),
    absent: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `(__getattr__, __dir__, __all__)` for the package `package`.

    names: public name -> "module:attribute", imported when first asked for.
    submodules: subpackages that are reachable as attributes without an import statement.
    absent: a name that was removed, renamed or never existed -> one sentence that says what to use.
    """
    subs = tuple(submodules)
    gone = dict(absent or {})
    public = sorted({*names, *subs})

    def __getattr__(name: str) -> Any:
        if name in names:
            module, _, attribute = names[name].partition(":")
            value = getattr(_load(module), attribute)
        elif name in subs:
            value = _load(f"{package}.{name}")
        elif name in gone:
            raise AttributeError(f"{package}.{name}: {gone[name]}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{_hint(name, public)}")
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*public, *vars(sys.modules[package])})

    return __getattr__, __dir__, public


def _load(module: str) -> Any:
    from importlib import import_module

    return import_module(module)


def _hint(name: str, public: list[str]) -> str:
    if name.startswith("__"):
        return ""
    from difflib import get_close_matches

    close = get_close_matches(name, public, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(public)}"
