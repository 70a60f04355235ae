"""Loader of the modules that travel with a function. Its text is a part of that function, for workers of any release.

It uses the standard library and what every release has, and nothing of its own module's surroundings.
"""

import importlib.util
import linecache
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from typing import Any

_MARK = "__farcall_included__"

#: Instead of the package ``farcall``, where it is not installed: included modules may decorate functions.
STUB = """
def function(function=None, /, **options):
    return (lambda decorated: decorated) if function is None else function


def include(*modules):
    pass


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise ModuleNotFoundError("the package farcall is not installed on this endpoint", name="farcall")

    return missing
"""


class ShippedModules:
    """Modules from source text: a finder, a loader, and a context in which ``import`` and pickle use them.

    Outside of the context they are not in ``sys.modules``, and a module of the same name that this machine has is:
    functions with different sources of a module do not meet. Modules stay loaded between calls.

    :param sources: for each module, whether it is a package, and its text.
    :param digest: identifies the sources.
    """

    def __init__(self, sources: Mapping[str, tuple[bool, str]], digest: str) -> None:
        self.digest = digest
        self.sources = dict(sources)
        if importlib.util.find_spec("farcall") is None:
            self.sources["farcall"] = (False, STUB)
        self._top_level = frozenset(name for name in self.sources if "." not in name)
        self._given = frozenset(name for name in sources if "." not in name)
        self._loaded: dict[str, types.ModuleType] = {}
        self._hidden: list[dict[str, types.ModuleType] | None] = []

    def __enter__(self) -> None:
        here = bool(self._hidden) or all(
            getattr(sys.modules.get(name), _MARK, None) == self.digest for name in self._given
        )
        self._hidden.append(None if here else self._install())

    def __exit__(self, *_: object) -> None:
        hidden = self._hidden.pop()
        if hidden is not None:
            sys.meta_path.remove(self)
            self._loaded = {name: sys.modules.pop(name) for name in self.sources if name in sys.modules}
            sys.modules.update(hidden)

    def _install(self) -> dict[str, types.ModuleType]:
        """Use these modules, and return the loaded modules of the same names."""
        hidden: dict[str, types.ModuleType] = {}
        if any(name in sys.modules for name in self._top_level):
            names = [name for name in sys.modules if name.partition(".")[0] in self._top_level]
            hidden = {name: sys.modules.pop(name) for name in names}
        sys.modules.update(self._loaded)
        sys.meta_path.insert(0, self)
        return hidden

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Find a module (see :class:`importlib.abc.MetaPathFinder`)."""
        if name not in self.sources:
            return None
        origin = f"<{name} {self.digest[:8]}>"
        spec = ModuleSpec(name, self, origin=origin, is_package=self.sources[name][0])  # type: ignore[arg-type]
        spec.has_location = True
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None: import creates a module of the usual kind."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Run a module (see :class:`importlib.abc.Loader`)."""
        spec = module.__spec__
        assert spec is not None
        filename, text = str(spec.origin), self.sources[spec.name][1]
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        setattr(module, _MARK, self.digest)
        exec(compile(text, filename, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - code of the user


class FunctionWithModules:
    """A function that is called with its modules. Workers that know it use the two attributes."""

    def __init__(self, modules: ShippedModules, function: Callable[..., Any]) -> None:
        self.farcall_modules = modules
        self.farcall_function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.farcall_modules:
            return self.farcall_function(*args, **kwargs)


def function_with_modules(buffer: bytes, sources: Mapping[str, tuple[bool, str]], digest: str) -> FunctionWithModules:
    """The function of a buffer, with modules that it shares with other functions of this process."""
    from farcall_common.payload import Serializer  # of the worker's release

    store = sys.modules.setdefault("farcall_shipped", types.ModuleType("farcall_shipped"))
    known = vars(store).setdefault("known", weakref.WeakValueDictionary())
    modules = known.get(digest)
    if modules is None:
        modules = known[digest] = ShippedModules(sources, digest)
    with modules:
        return FunctionWithModules(modules, Serializer().deserialize_function(buffer))
