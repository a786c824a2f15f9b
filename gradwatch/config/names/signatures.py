"""Read the parameters of functions and classes that a config may set, from their sources."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import griffe

from gradwatch.config.names.sources import final_object, resolve
from gradwatch.config.names.yaml_types import UNKNOWN, Unwritable, to_type, to_value, type_of_default
from gradwatch.config.wording import show

# a period before a capital letter or code: `e.g. this` ends no sentence
_SENTENCE_END = re.compile(r"(?<=[\w)`]\.)\s+(?=[A-Z`])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a function.

    Args:
        name: Name in the source.
        type: Type of its YAML values; Unwritable if YAML cannot express them.
        required: Whether it has no default.
        default: Value of the default; UNKNOWN if there is none or it cannot be evaluated.
        text: The default as written in the source; empty if there is none.
        doc: Its description in the docstring's `Args`.
    """

    name: str
    type: Any
    required: bool
    default: Any = UNKNOWN
    text: str = ""
    doc: str = ""

    def shown_default(self) -> str:
        """Return the default as YAML, or as written in the source if it cannot be evaluated."""
        return self.text if self.default is UNKNOWN else show(self.default)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Signature:
    """The settings that a config may give to a function or class. There is one for each, so what it leads to is kept.

    Args:
        name: Its name in a config.
        parameters: Parameters that a config may set.
        doc: Its whole docstring; empty if it has none.
        unusable: Reason why no config can use it, or an empty string.
        is_open: Whether it accepts keywords that its source does not name.
    """

    name: str
    parameters: tuple[Parameter, ...]
    doc: str = ""
    unusable: str = ""
    is_open: bool = False

    @property
    def summary(self) -> str:
        """The first sentence of the docstring, without markup."""
        paragraph = " ".join(self.doc.strip().split("\n\n")[0].split())
        return _without_markup(_SENTENCE_END.split(paragraph)[0])


def read_signature(
    found: griffe.Object,
    *,
    called: str = "",
    hidden: Collection[str] = (),
    types: Mapping[str, Any] = MappingProxyType({}),
) -> Signature:
    """Read the signature of a function or class.

    Keywords that it passes on (`**kwargs`) are followed to the function that names them.

    Args:
        found: The function or class.
        called: Its name in a config; by default its name in the source.
        hidden: Parameters that a config must not set, such as those that the harness passes.
        types: Types by the name of a parameter, instead of the annotated ones.
    """
    function = _function(found)
    parameters, is_open = _reachable(function) if function else ([], False)
    doc = _docstring(found)
    # a class may document its parameters at the class or at the constructor
    docs = _argument_docs(doc) | (_argument_docs(_docstring(function)) if function else {})
    shown = [
        replace(p, doc=docs.get(p.name, ""), type=types.get(p.name, p.type))
        for p in map(_parameter, parameters)
        if p.name not in hidden and p.name[0] != "_"
    ]
    # an optional parameter that YAML cannot express is only hidden, a required one makes the whole name unusable
    needed = [p.name for p in shown if p.required and p.type is Unwritable]
    return Signature(
        name=called or found.name,
        parameters=tuple(p for p in shown if p.type is not Unwritable),
        doc=doc,
        unusable=f"needs '{needed[0]}', which YAML cannot say" if needed else "",
        is_open=is_open,
    )


def required_inputs(module: griffe.Object) -> tuple[str, ...]:
    """Return the names of the required inputs of `forward` in a module class."""
    forward = module.all_members.get("forward")
    found = final_object(forward) if forward else None
    written = found.parameters if isinstance(found, griffe.Function) else ()
    return tuple(p.name for p in written if p.required and p.name != "self")


def _function(found: griffe.Object | None) -> griffe.Function | None:
    """Return the function itself, or the constructor of a class, which may be inherited."""
    if isinstance(found, griffe.Class):
        constructor = found.all_members.get("__init__")
        found = final_object(constructor) if constructor else None
    return found if isinstance(found, griffe.Function) else None


def _reachable(function: griffe.Function, seen: frozenset[str] = frozenset()) -> tuple[list[griffe.Parameter], bool]:
    """Return the parameters that a function names or its `**kwargs` reach, and whether it accepts others."""
    written = list(function.parameters)
    kwargs = next((p.name for p in written if p.kind is griffe.ParameterKind.var_keyword), None)
    named = {p.name: p for p in written if not str(p.kind).startswith("variadic") and p.name not in ("self", "cls")}
    is_open = False
    for call in _calls(function) if kwargs and function.path not in seen else ():  # `seen`: functions may be recursive
        match call:
            # kwargs.pop("name", default): a parameter that only the body names
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=owner), attr="pop" | "get"),
                args=[ast.Constant(value=str() as name), default],
            ) if owner == kwargs:
                popped = griffe.Parameter(name, default=ast.unparse(default))
                popped.function = function
                named.setdefault(name, popped)
            case _ if any(k.arg is None and ast.unparse(k.value) == kwargs for k in call.keywords):
                callee = _callee(call.func, function)
                # the source of the callee is not known, so any keyword may be valid
                reached, reached_open = _reachable(callee, seen | {function.path}) if callee else ([], True)
                is_open |= reached_open
                for parameter in _unbound(reached, call):
                    named.setdefault(parameter.name, parameter)
    return list(named.values()), is_open


def _calls(function: griffe.Function) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(function.source)) if isinstance(node, ast.Call)]


def _callee(called: ast.expr, function: griffe.Function) -> griffe.Function | None:
    """Return the callee of a call in a function: a function, a class, a class method, or `super().__init__`."""
    match called:
        case ast.Name(id=name):
            return _function(resolve(function, name))
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__"):
            bases = function.parent.mro() if isinstance(function.parent, griffe.Class) else []
            return next((_function(base) for base in bases if "__init__" in base.members), None)
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            owner = resolve(function, name)
            if isinstance(owner, griffe.Class) and attribute in owner.members:
                return _function(final_object(owner.members[attribute]))
    return None


def _unbound(parameters: list[griffe.Parameter], call: ast.Call) -> list[griffe.Parameter]:
    """Return the parameters that a call does not set."""
    positional = [p.name for p in parameters if p.kind is not griffe.ParameterKind.keyword_only]
    given = {*positional[: len(call.args)], *(k.arg for k in call.keywords)}
    return [p for p in parameters if p.name not in given]


def _parameter(written: griffe.Parameter) -> Parameter:
    scope = written.function
    assert scope, "a parameter is one of a function"
    value = UNKNOWN if written.default is None else to_value(written.default, scope)
    allowed = type_of_default(value) if written.annotation is None else to_type(written.annotation, scope)
    if written.annotation is not None and value is None and allowed is not Unwritable:
        allowed = allowed | None  # `x: int = None` also accepts None
    return Parameter(
        name=written.name,
        type=allowed,
        required=written.required,
        default=value,
        text="" if written.default is None else str(written.default),
    )


def _docstring(found: griffe.Object) -> str:
    """Return the docstring of an object, even if it is assigned to `__doc__` later, as in torch's optimizers."""
    if found.docstring:
        return found.docstring.value
    pattern = rf'^{found.name}\.__doc__ = \(?\s*[rf]*"""(.*?)"""'
    assigned = re.search(pattern, found.module.source, re.DOTALL | re.MULTILINE)
    return inspect.cleandoc(assigned[1]) if assigned else ""


def _argument_docs(docstring: str) -> dict[str, str]:
    """Return the descriptions in the section `Args` by the name of the argument."""
    sections = griffe.Docstring(docstring).parse("google", warnings=False)
    items = [item for s in sections if s.kind is griffe.DocstringSectionKind.parameters for item in s.value]
    return {item.name.lstrip("*"): _without_markup(" ".join(item.description.split())) for item in items}


def _without_markup(text: str) -> str:
    """Return a text without reStructuredText roles, links and double backticks."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", text)
    text = re.sub(r"`([^`<]+?)\s*(?:<[^>]*>)?`__?", r"\1", text)
    return text.replace("``", "")
