"""What is made wrong: each pattern gives, for one expression, others that could stand in its place."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

from tests.tools.mutants import sql

Change = tuple[ast.expr, str, str]
"""The new expression, and what of it differs: before and after."""

ODD: dict[str, Any] = {
    **dict.fromkeys(("fence", "fenced", "incarnation", "holder", "version", "known", "turns", "known_turns"), 0),
    **dict.fromkeys(
        ("opened_at", "claimed_at", "last_event_at", "known_at", "decided_at", "came_at", "heartbeat_at"), 0.0
    ),
    **dict.fromkeys(("pinned_upto", "generation", "epoch", "seq", "turn", "reserved", "sampled", "position", "by"), 0),
    **dict.fromkeys(("retry_key", "agent_id", "stages", "after", "since", "until", "binding", "adapter"), None),
    **dict.fromkeys(("unlike", "payloads"), ()),
    **dict.fromkeys(("body_hash",), ""),
}
"""Fields that tell one claim, log or reader from another, and what stands in their place."""

TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}

OTHERS = {"min": "max", "max": "min", "any": "all", "all": "any", "is_": "is_not", "is_not": "is_"}
"""Functions that are mistaken for each other."""

PLAIN_CALLS = re.compile(
    r"(\b_?(log|logger|metrics|stages|crash_points|unreadable|counts|warnings)\.)|(\badd_note$)|^super\(|^reach$"
)
"""Calls that say something, measure or name a crash point: nothing depends on them."""

TYPE_CHECKS = ("isinstance", "issubclass", "cast", "TypeVar")


def is_left_out(statement: ast.stmt) -> bool:
    """Does a statement only import, say or check something?"""
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.Expr(value=ast.Constant()):
            return True
        case ast.If(test=test):
            return ast.unparse(test) in ("TYPE_CHECKING", "crash_points.ARMED")
        case ast.FunctionDef(name=name):
            return name in ("__repr__", "__str__") or any(
                "overload" in ast.unparse(one) for one in statement.decorator_list
            )
        case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
            return PLAIN_CALLS.search(ast.unparse(_call(statement.value).func)) is not None
        case ast.Assign(targets=[ast.Name(id="__all__" | "log" | "inherit_cache")]):
            return True
    return False


def is_plain(node: ast.AST) -> bool:
    """Is a part of a statement a message, a type, or what an error says?"""
    match node:
        case ast.JoinedStr():
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in TYPE_CHECKS or name.endswith("Error")
    return False


def _call(node: ast.expr) -> ast.Call:
    called = node.value if isinstance(node, ast.Await) else node
    assert isinstance(called, ast.Call)
    return called


def _with(node: ast.expr, **fields: Any) -> Any:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _whole(node: ast.expr, new: ast.expr) -> Change:
    return new, ast.unparse(node), ast.unparse(new)


def _but(items: list[Any], index: int) -> list[Any]:
    return [*items[:index], *items[index + 1 :]]


def operand(node: ast.AST) -> Iterator[Change]:
    """One condition of several is dropped."""
    if isinstance(node, ast.BoolOp):
        for index in range(len(node.values)):
            left = _but(node.values, index)
            yield _whole(node, left[0] if len(left) == 1 else _with(node, values=left))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        yield _whole(node, node.left)
        yield _whole(node, node.right)


def where(node: ast.AST) -> Iterator[Change]:
    """One condition of a statement is dropped."""
    match node:
        case ast.Call(func=ast.Attribute(attr="where" | "having")) | ast.Call(func=ast.Name(id="and_" | "or_")):
            name = "where" if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
            for index, one in enumerate(node.args):
                if len(node.args) > 1 or name == "where":
                    yield _with(node, args=_but(node.args, index)), f"{name}({ast.unparse(one)})", "nothing"
        case ast.List(elts=[ast.Compare(), ast.Compare(), *_]):
            for index, one in enumerate(node.elts):
                yield _with(node, elts=_but(node.elts, index)), ast.unparse(one), "nothing"


def comparison(node: ast.AST) -> Iterator[Change]:
    """A comparison is turned."""
    if isinstance(node, ast.Compare):
        for index, op in enumerate(node.ops):
            yield _whole(node, _with(node, ops=[*node.ops[:index], TURNED[type(op)](), *node.ops[index + 1 :]]))


def negation(node: ast.AST) -> Iterator[Change]:
    """A `not` is dropped."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
        yield _whole(node, node.operand)


def choice(node: ast.AST) -> Iterator[Change]:
    """Of two values always the same is taken."""
    if isinstance(node, ast.IfExp):
        yield _whole(node, node.body)
        yield _whole(node, node.orelse)


def values(node: ast.AST) -> Iterator[Change]:
    """A column is not written, or a parameter not given."""
    match node:
        case ast.Call(func=ast.Attribute(attr="values"), keywords=[_, _, *_]):
            for index, one in enumerate(node.keywords):
                yield (
                    _with(node, keywords=_but(node.keywords, index)),
                    f"values({one.arg}={ast.unparse(one.value)})",
                    "nothing",
                )
        case ast.Dict(keys=[ast.Constant(value=str()), ast.Constant(value=str()), *_]):
            for index, key in enumerate(node.keys):
                if key is not None:
                    new = _with(node, keys=_but(node.keys, index), values=_but(node.values, index))
                    yield new, f"{ast.unparse(key)}: {ast.unparse(node.values[index])}", "nothing"


def field(node: ast.AST) -> Iterator[Change]:
    """An odd field is a constant."""
    if isinstance(node, ast.Call):
        for index, one in enumerate(node.args):
            if isinstance(one, ast.Attribute) and one.attr in ODD:
                args = [*node.args[:index], ast.Constant(ODD[one.attr]), *node.args[index + 1 :]]
                yield _with(node, args=args), *_named(node, one.attr, one, ODD[one.attr])
        for index, given in enumerate(node.keywords):
            if given.arg in ODD and not isinstance(given.value, ast.Constant):
                new = ast.keyword(given.arg, ast.Constant(ODD[given.arg]))
                keywords = [*node.keywords[:index], new, *node.keywords[index + 1 :]]
                yield _with(node, keywords=keywords), *_named(node, given.arg, given.value, ODD[given.arg])
    elif isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load):
        for index, one in enumerate(node.elts):
            if isinstance(one, ast.Attribute) and one.attr in ODD:
                elts = [*node.elts[:index], ast.Constant(ODD[one.attr]), *node.elts[index + 1 :]]
                yield _whole(node, _with(node, elts=elts))


def _named(node: ast.Call, name: str, value: ast.expr, constant: Any) -> tuple[str, str]:
    called = ast.unparse(node.func).rsplit(".", 1)[-1].rsplit(")", 1)[-1]
    return f"{called}({name}: {ast.unparse(value)})", repr(constant)


def number(node: ast.AST) -> Iterator[Change]:
    """A number is one too many, or one is not added."""
    match node:
        case ast.Compare():
            for index, one in enumerate(node.comparators):
                if _is_int(one):
                    comparators = [*node.comparators[:index], _more(one), *node.comparators[index + 1 :]]
                    yield _whole(node, _with(node, comparators=comparators))
        case ast.BinOp(op=ast.Add() | ast.Sub(), right=right) if _is_int(right):
            yield _whole(node, node.left)
        case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper) as part):
            if lower is not None and _is_int(lower):
                yield _whole(node, _with(node, slice=_with(part, lower=_more(lower))))
            if upper is not None and _is_int(upper):
                yield _whole(node, _with(node, slice=_with(part, upper=_more(upper))))
        case ast.Subscript(slice=index, ctx=ast.Load()) if _is_int(index):
            yield _whole(node, _with(node, slice=_more(index)))


def _is_int(node: ast.expr) -> bool:
    one = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
    return isinstance(one, ast.Constant) and type(one.value) is int


def _more(node: ast.expr) -> ast.expr:
    return ast.Constant(ast.literal_eval(node) + 1)


def flag(node: ast.AST) -> Iterator[Change]:
    """A given yes is a no."""
    if isinstance(node, ast.Call):
        for index, one in enumerate(node.keywords):
            if isinstance(one.value, ast.Constant) and isinstance(one.value.value, bool) and one.arg != "strict":
                keywords = [*node.keywords[:index], _flipped(one), *node.keywords[index + 1 :]]
                yield _with(node, keywords=keywords), *_named(node, str(one.arg), one.value, not one.value.value)


def _flipped(one: ast.keyword) -> ast.keyword:
    assert isinstance(one.value, ast.Constant)
    return ast.keyword(one.arg, ast.Constant(not one.value.value))


def default(node: ast.AST) -> Iterator[Change]:
    """What holds where nothing is given, or of all of a class, is another."""
    if isinstance(node, ast.arguments):
        given = [*node.posonlyargs, *node.args][-len(node.defaults) :] if node.defaults else []
        for index, (argument, value) in enumerate(zip(given, node.defaults, strict=True)):
            if (other := _other(value)) is not None:
                new = _with(node, defaults=[*node.defaults[:index], other, *node.defaults[index + 1 :]])  # type: ignore[arg-type]
                yield new, f"{argument.arg} = {ast.unparse(value)}", ast.unparse(other)
        for index, (argument, only) in enumerate(zip(node.kwonlyargs, node.kw_defaults, strict=True)):
            if only is not None and (other := _other(only)) is not None:
                new = _with(node, kw_defaults=[*node.kw_defaults[:index], other, *node.kw_defaults[index + 1 :]])  # type: ignore[arg-type]
                yield new, f"{argument.arg} = {ast.unparse(only)}", ast.unparse(other)


def _other(value: ast.expr) -> ast.expr | None:
    match value:
        case ast.Constant(value=bool(given)):
            return ast.Constant(not given)
        case ast.Constant(value=int(count)):
            return ast.Constant(count + 1)
    return None


def function(node: ast.AST) -> Iterator[Change]:
    """Another function of its kind is called."""
    match node:
        case ast.Call(func=ast.Name(id=name) as called) if name in OTHERS:
            yield _whole(node, _with(node, func=_with(called, id=OTHERS[name])))
        case ast.Call(func=ast.Attribute(attr=name) as called) if name in OTHERS and name not in ("any", "all"):
            yield _whole(node, _with(node, func=_with(called, attr=OTHERS[name])))


def order(node: ast.AST) -> Iterator[Change]:
    """Rows or values are in no order, or in another."""
    match node:
        case ast.Call(func=ast.Attribute(attr="order_by" | "desc" | "asc" as name, value=inner)):
            what = (
                f"{name}({', '.join(map(ast.unparse, node.args))})" if node.args else f"{ast.unparse(inner)}.{name}()"
            )
            yield inner, what, "nothing"
        case ast.Call(func=ast.Name(id="sorted" | "reversed"), args=[inner, *_]):
            yield _whole(node, ast.Call(ast.Name("list", ast.Load()), [inner], []))


def lock(node: ast.AST) -> Iterator[Change]:
    """A row is not locked."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "with_for_update":
        yield node.func.value, f"with_for_update({', '.join(map(ast.unparse, node.keywords))})", "nothing"


def text(node: ast.AST) -> Iterator[Change]:
    """A condition, a column, a comparison, a number, an order or a lock in SQL that is text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and sql.is_sql(node.value):
        for new, before, after in sql.changes(node.value):
            yield ast.Constant(new), before, after


Pattern = Callable[[ast.AST], Iterator[Change]]

PATTERNS: dict[str, Pattern] = {
    "operand": operand,
    "where": where,
    "comparison": comparison,
    "not": negation,
    "choice": choice,
    "values": values,
    "field": field,
    "number": number,
    "flag": flag,
    "default": default,
    "function": function,
    "order": order,
    "lock": lock,
    "text": text,
}
"""By name; those of whole statements follow."""


def of_statement(statement: ast.stmt, *, runs: bool) -> Iterator[tuple[str, str, str, ast.stmt]]:
    """A guard, a write, a call or an assignment is removed, a condition always holds, a yes is a no: pattern, before,
    after and the new statement. Only what a function `runs` is removed."""
    match statement:
        case ast.Return(value=ast.Constant(value=value)) | ast.AnnAssign(value=ast.Constant(value=value)):
            yield from _other_value(statement, value)
        case ast.Assign(value=ast.Constant(value=value)) if runs or isinstance(value, bool):
            yield from _other_value(statement, value)
    if not runs:
        return
    match statement:
        case ast.If(test=test, body=[*_, last]):
            if isinstance(last, ast.Return | ast.Raise | ast.Continue | ast.Break):
                never = ast.If(ast.Constant(False), statement.body, statement.orelse)
                yield "guard", f"if {ast.unparse(test)}: … {_brief(last)}", "nothing", never
            else:
                always = ast.If(ast.Constant(True), statement.body, statement.orelse)
                yield "condition", f"if {ast.unparse(test)}", "if True", always
        case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
            what = "write" if _is_write(statement) else "call"
            yield what, ast.unparse(statement), "nothing", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign() | ast.Delete():
            yield "state", ast.unparse(statement), "nothing", ast.Pass()


def _brief(statement: ast.stmt) -> str:
    """A statement without what an error says."""
    raised = statement.exc if isinstance(statement, ast.Raise) else None
    return f"raise {ast.unparse(raised.func)}" if isinstance(raised, ast.Call) else ast.unparse(statement)


def _other_value(statement: ast.Return | ast.AnnAssign | ast.Assign, value: Any) -> Iterator[Any]:
    other = _other(ast.Constant(value))
    if other is not None:
        new = copy.copy(statement)
        new.value = other
        yield "constant", ast.unparse(statement), ast.unparse(other), new


def _is_write(statement: ast.stmt) -> bool:
    """Does a statement write to the store?"""
    match statement:
        case ast.Expr(value=value) | ast.Assign(value=value):
            called = value.value if isinstance(value, ast.Await) else value
            return isinstance(called, ast.Call) and WRITES.search(ast.unparse(called)) is not None
    return False


WRITES = re.compile(
    r"\btx\.(run|run_all|insert|each|lock)\(|\(tx\b|\b(execute|executemany|many)\(|\b(submit|write_with_retry)\("
)


def change_places(one: ast.stmt, other: ast.stmt) -> bool:
    """May two neighbours change places, so that another order results that runs?"""
    if not (_acts(one) and _acts(other)) or not (_waits(one) or _waits(other)):
        return False
    return not (_stored(one) & _loaded(other) or _stored(other) & _loaded(one))


def _acts(statement: ast.stmt) -> bool:
    if is_left_out(statement):
        return False
    match statement:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
    return _waits(statement) and isinstance(statement, ast.Assign)


def _waits(statement: ast.stmt) -> bool:
    return _is_write(statement) or any(isinstance(node, ast.Await) for node in ast.walk(statement))


def _stored(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _loaded(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
