"""Collects the error messages of the project from its source code."""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ["storage_formats", "edje_index", "pipelines", "benchmarks"]
INTRODUCTION = """# Error messages

This page lists every message that the packages raise with a fixed text, by the class of the exception. It is
generated from the source code. `<NAME>` stands for a value. Each message says what is wrong and what to do. The
command line prints the message after `error:` and ends with the exit code of the class. If a value is wrong, the
message begins there with the name of the option. To find the message that you see, search this page for words of it
that are no names or numbers.

To catch these errors in a program, catch `EdjeError`, the base class of all of them, or one of the classes below.
Inputs that cannot be indexed raise nothing: they become failed rows, and `edje-index failures INDEX` lists the
reasons.
"""


@dataclass(frozen=True)
class ErrorClass:
    """An exception class of the project: its base classes, what it means, and its exit code if it sets one."""

    bases: tuple[str, ...]
    meaning: str
    exit_code: int | None


@dataclass(frozen=True)
class Message:
    """A text that is raised: the name of the exception class, and the text with `<NAME>` for values."""

    error: str
    template: str


def error_classes() -> dict[str, ErrorClass]:
    """`EdjeError` and its subclasses by name, read from the source code, which imports nothing."""
    classes: dict[str, ErrorClass] = {}
    for module in modules():
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, _described(node))

    def is_ours(name: str) -> bool:
        return name == "EdjeError" or (name in classes and any(map(is_ours, classes[name].bases)))

    return {name: error for name, error in classes.items() if is_ours(name)}


def _described(node: ast.ClassDef) -> ErrorClass:
    codes = [
        statement.value.value
        for statement in node.body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and statement.targets[0].id == "exit_code"
        and isinstance(statement.value, ast.Constant)
    ]
    bases = tuple(base.id for base in node.bases if isinstance(base, ast.Name))
    paragraph = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
    return ErrorClass(bases, paragraph, codes[0] if codes else None)


def exit_code(name: str, classes: dict[str, ErrorClass]) -> int:
    """Exit code of the command line for an exception class, inherited if the class does not set it."""
    error = classes[name]
    if error.exit_code is not None:
        return error.exit_code
    return exit_code(next(base for base in error.bases if base in classes), classes)


@cache
def modules() -> tuple[ast.Module, ...]:
    """Syntax trees of the source files of the packages."""
    paths = [path for package in PACKAGES for path in sorted((REPO / package).rglob("*.py"))]
    return tuple(ast.parse(path.read_text()) for path in paths)


def template(node: ast.expr) -> str | None:
    """The text of a message, with `<NAME>` for values. None if the text is not written in this place."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_piece(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = template(node.left), template(node.right)
        return None if left is None or right is None else left + right
    return None


def _piece(node: ast.expr) -> str:
    if isinstance(node, ast.FormattedValue):
        names = [
            inner.attr if isinstance(inner, ast.Attribute) else inner.id
            for inner in ast.walk(node.value)
            if isinstance(inner, ast.Attribute | ast.Name)
        ]
        return f"<{(names[0] if names else 'value').strip('_').upper()}>"
    return str(node.value) if isinstance(node, ast.Constant) else ""


def raised(module: ast.Module, errors: frozenset[str]) -> Iterator[Message]:
    """Yield the messages with which `module` makes exceptions of these classes."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and (name := _called(node.func)) in errors:
            text = next(filter(None, map(template, node.args)), "")  # an HTTP status may stand before the text
            if re.search(r"[a-z]{3}", text):
                yield Message(name, text)


def _called(function: ast.expr) -> str:
    """The name of what a call calls, without its module: `UsageError` for `click.UsageError(...)`."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


@cache
def all_messages() -> set[Message]:
    """The messages of all packages."""
    errors = frozenset(error_classes())
    return {message for module in modules() for message in raised(module, errors)}


def errors_page() -> str:
    """Markdown page: what each exception class means, its exit code, and its messages."""
    messages, classes = all_messages(), error_classes()
    parts = [INTRODUCTION]
    for name, error in sorted(classes.items()):
        meaning = re.sub(r" Exit code \d\.$", "", error.meaning)
        parts.append(f"## {name}\n\n{meaning} Exit code {exit_code(name, classes)}.\n")
        texts = sorted({message.template for message in messages if message.error == name}, key=str.lower)
        parts += [f"- {_shown(text)}" for text in texts]
        parts.append("")
    return "\n".join(parts)


def _shown(text: str) -> str:
    return "<code>" + html.escape(" ".join(text.split())).replace("*", "&#42;").replace("_", "&#95;") + "</code>"
