"""From source to a file that rules can judge: parsed, with positions, followed."""

from __future__ import annotations

import ast

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from hasten.script.flow.follow import follow
from hasten.script.rules.file import File
from hasten.script.rules.sources import Source, Unreadable


def parse(source: Source) -> File | None:
    """The file with its facts; None when nothing in it has to do with PyTorch.

    Raises:
        Unreadable: the source is not Python.
    """
    try:
        tree = cst.parse_module(source.text)
    except cst.ParserSyntaxError as error:
        line, column, why = _said(source.text, error)
        raise Unreadable(source.place(line, column), why) from None
    except RecursionError:
        raise Unreadable((source.path, 1, 1), "it is nested too deeply to be read") from None
    if "torch" not in source.text and "cuda" not in source.text:
        return None
    wrapper = MetadataWrapper(tree, unsafe_skip_copy=True)
    positions = wrapper.resolve(PositionProvider)
    return File(source.path, wrapper.module, follow(wrapper.module), positions)


def _said(text: str, error: cst.ParserSyntaxError) -> tuple[int, int, str]:
    """Where the syntax error is and what it is, as Python says it if Python finds one too."""
    try:
        ast.parse(text)
    except SyntaxError as own:
        return own.lineno or 1, own.offset or 1, own.msg
    except ValueError as own:
        return 1, 1, str(own)
    return error.raw_line, error.raw_column + 1, error.message.splitlines()[0]
