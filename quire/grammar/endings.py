"""Whether every rule of a grammar can come to an end: an answer that has entered one that cannot
would never be over."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping

from quire.errors import InvalidParameterError
from quire.grammar.gbnf import Alt, Node, Ref, Repeat, children_of


def refs_of(node: Node) -> Iterator[str]:
    """Yield the names of the rules that a node refers to."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Ref):
            yield node.name
        waiting += children_of(node)


def reachable_from(nodes: Mapping[str, Node], root: str) -> list[str]:
    """Return the rules that an answer may enter, `root` first."""
    found, waiting = {root: None}, [root]
    while waiting:
        for ref in refs_of(nodes[waiting.pop()]):
            if ref not in found:
                found[ref] = None
                waiting.append(ref)
    return list(found)


def check_ends(nodes: Mapping[str, Node], reachable: Collection[str]) -> None:
    """Refuse rules that no finite text satisfies: the least fixed point of those that have an end,
    if those that they need have. Raises InvalidParameterError."""
    users: dict[str, set[str]] = {name: set() for name in nodes}
    for name in reachable:
        for ref in refs_of(nodes[name]):
            users[ref].add(name)
    ending: set[str] = set()
    waiting = deque(reachable)
    while waiting:
        name = waiting.popleft()
        if name not in ending and _can_end(nodes[name], ending):
            ending.add(name)
            waiting += users[name]
    endless = [name for name in reachable if name not in ending]
    if endless:
        name = endless[-1].rpartition("/")[2]
        message = (
            f"the rule {name[:64]!r} of the grammar can never come to an end: each way "
            "through it leads back to it"
        )
        raise InvalidParameterError(f"structured_outputs: {message}", param="structured_outputs")


def _can_end(node: Node, ending: Collection[str]) -> bool:
    if isinstance(node, Ref):
        return node.name in ending
    if isinstance(node, Alt):
        return any(_can_end(option, ending) for option in node.options)
    if isinstance(node, Repeat) and node.low == 0:
        return True
    return all(_can_end(child, ending) for child in children_of(node))
