"""No unbounded wait: each wait in the library has a limit, or a comment that says who ends it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import tutti

ROOT = Path(tutti.__file__).parent
SAYS = "ended by "
"""How the comment begins. It stands in the three lines before the wait, or in its own."""

WAITS = frozenset({"wait", "join", "acquire", "select", "poll", "get", "result", "communicate", "pause"})
"""Methods and functions that wait, if they are called without arguments: the first argument of most is the limit."""

WORKS = frozenset(
    {
        "self",
        "sending",
        "receiving",
        "send",
        "_receive",
        "receive",
        "started",
        "_pending",
        "stage",
        "messages",
        "_messages",
        "known",
        "_weights_known",
        "done",
        "_operation",
    }
)
"""Names of variables and attributes that hold a `Work` of a transport."""


def unbounded(tree: ast.AST, lines: list[str]) -> Iterator[int]:
    """Lines of waits that have neither a limit nor a comment."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            if isinstance(node, ast.While) and _sleeps_for_ever(node) and not _explained(lines, node.lineno):
                yield node.lineno
            continue
        if _waits(node.func, node) and not _explained(lines, node.lineno):
            yield node.lineno


def _waits(function: ast.Attribute, call: ast.Call) -> bool:
    name, owner = function.attr, ast.unparse(function.value).lower().rpartition(".")[2]
    if name not in WAITS or call.args or call.keywords:
        return False
    asks = {
        "get": "queue" in owner,  # A dictionary's takes a key. Without one it is a context variable's, or a queue's.
        "join": "thread" in owner or "process" in owner,
        "poll": owner not in {"select", "self"} and "process" not in owner,  # A process's only asks.
        "pause": owner == "signal",
        "wait": not _is_work(owner),
    }
    return asks.get(name, True)


def _is_work(owner: str) -> bool:
    """Whether it is a `Work` of a transport, judged by its name: the loss of a peer ends each such wait."""
    return owner in WORKS or owner.endswith(")") or "work" in owner


def _sleeps_for_ever(loop: ast.While) -> bool:
    """Whether a loop has no condition, no way out of it, and sleeps."""
    if not (isinstance(loop.test, ast.Constant) and loop.test.value):
        return False
    inside = [node for part in loop.body for node in ast.walk(part)]
    leaves = any(isinstance(node, ast.Return | ast.Break | ast.Raise) for node in inside)
    sleeps = any(isinstance(node, ast.Attribute) and node.attr == "sleep" for node in inside)
    return sleeps and not leaves


def _explained(lines: list[str], number: int) -> bool:
    return any(SAYS in line.lower() for line in lines[max(0, number - 4) : number])


def test_each_wait_has_a_limit_or_somebody_who_ends_it() -> None:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text()
        found += [f"{path.relative_to(ROOT)}:{number}" for number in unbounded(ast.parse(text), text.splitlines())]
    assert not found, f"waits without a limit, and without a comment 'Ended by ...': {', '.join(found)}"


def test_the_rule_itself() -> None:
    code = """
event.wait()
event.wait(3)
# Ended by the thread.
event.wait()



thread.join()
queue.get()
mapping.get(key)
lock.acquire()
lock.acquire(timeout=3)
transport.all_reduce(x).wait()
while True:
    time.sleep(1)
while True:
    time.sleep(1)
    if over():
        break
"""
    assert sorted(unbounded(ast.parse(code), code.splitlines())) == [2, 9, 10, 12, 15]
