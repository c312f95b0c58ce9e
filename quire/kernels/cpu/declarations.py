"""Whether an extension module is the one that a stub file declares. nanobind keeps each function's
signature, so the module tells of itself, and nothing has to be numbered. Compared are names and
numbers of parameters; types are the type checker's.
"""

from __future__ import annotations

import ast
from types import ModuleType
from typing import Any

Counts = dict[str, set[int]]
"""By name: the numbers of parameters of its overloads; none for what is not called,
or takes any."""


def differences(module: ModuleType, stub: str) -> list[str]:
    """Return what of the declarations in `stub` the module lacks or has otherwise, in a few words
    each."""
    found = []
    for name, declared in _declared(ast.parse(stub).body).items():
        what = _find(module, name)
        if what is None:
            found.append(f"no {name}")
        elif declared and _num_parameters(what) != declared:
            found.append(f"another {name}")
    return found


def _declared(body: list[ast.stmt], prefix: str = "") -> Counts:
    counts: Counts = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            counts[prefix + node.name] = set()
            counts |= _declared(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            is_property = any(
                isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list
            )
            takes_any = is_property or node.args.vararg is not None
            counts.setdefault(prefix + node.name, set()).update(() if takes_any else {_count(node)})
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            counts[prefix + node.target.id] = set()
    return counts


def _find(module: ModuleType, name: str) -> Any:
    what: Any = module
    for part in name.split("."):
        what = None if what is None else getattr(what, part, None)
    return what


def _num_parameters(what: Any) -> set[int]:
    counts = set()
    for signature, *_ in getattr(what, "__nb_signature__", ()):
        [node] = ast.parse(f"{signature}: ...").body
        assert isinstance(node, ast.FunctionDef)
        counts.add(_count(node))
    return counts


def _count(node: ast.FunctionDef) -> int:
    return len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
