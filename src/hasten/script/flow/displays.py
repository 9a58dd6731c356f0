"""Lists, tuples, dicts and comprehensions: what they hold."""

# A method for each kind of node is named after it, as LibCST names them.
# ruff: noqa: N802, D102

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import libcst as cst

from hasten.script.flow.attributes import Attributes
from hasten.script.flow.facts import Loop
from hasten.script.flow.values import (
    Const,
    Dict,
    Scope,
    Seq,
    Unknown,
    Value,
)


class Displays(Attributes):
    """Evaluate what holds other values."""

    def ev_Tuple(self, node: cst.Tuple) -> Value:
        return self._sequence("tuple", node)

    def ev_List(self, node: cst.List) -> Value:
        return self._sequence("list", node)

    def ev_Set(self, node: cst.Set) -> Value:
        return self._sequence("set", node)

    def _sequence(self, kind: str, node: cst.Tuple | cst.List | cst.Set) -> Value:
        items: list[Value] = []
        elem: Value | None = None
        for element in node.elements:
            value = self.ev(element.value)
            if isinstance(element, cst.StarredElement):
                inner = value.items if isinstance(value, Seq) else None
                if inner is None:
                    elem = self.item_of(value, element)
                else:
                    items += inner
            else:
                items.append(value)
        origin = self.origin("other", node)
        if elem is not None:
            return Seq(kind, None, self.join_all([*items, elem]), origin=origin)
        return Seq(kind, items, origin=origin)

    def ev_Dict(self, node: cst.Dict) -> Value:
        result = Dict({}, origin=self.origin("other", node))
        for element in node.elements:
            value = self.ev(element.value)
            if isinstance(element, cst.StarredDictElement):
                if isinstance(value, Dict):
                    for key, inner in value.known().items():
                        result.fields["items", key] = inner
                    if value.fields["elem"] is not None:
                        result.fields["elem"] = value.fields["elem"]
                else:
                    result.fields["elem"] = Unknown()
            else:
                assert isinstance(element, cst.DictElement)
                key = self.ev(element.key)
                if isinstance(key, Const):
                    result.fields["items", key.value] = value
                else:
                    old = result.fields["elem"]
                    result.fields["elem"] = value if old is None else self.join_all([old, value])
        return result

    def _comprehension(self, node: Any, finish: Callable[[], Value]) -> tuple[Value, bool]:
        """The value for one round, and whether all rounds are taken (no condition)."""
        outer = self.scope
        self.scope = Scope({}, outer)
        try:
            return self._rounds(node, node.for_in, finish)
        finally:
            self.scope = outer

    def _rounds(
        self, node: Any, comp: cst.CompFor, finish: Callable[[], Value]
    ) -> tuple[Value, bool]:
        source = self.ev(comp.iter)
        made = Loop(node, source)
        if isinstance(source, Seq):
            made.rounds = source.extra.get("rounds")
        self.assign(comp.target, self.item_of(source, comp.iter), comp)
        with self.within("loop", node, loop=made):
            for test in comp.ifs:
                self.ev(test.test)
            if comp.inner_for_in is not None:
                return self._rounds(node, comp.inner_for_in, finish)[0], False
            return finish(), not comp.ifs

    def _sequence_of(self, kind: str, node: Any) -> Value:
        source_items = self._known_items(node)
        if source_items is not None:
            items = []
            for item in source_items:
                outer = self.scope
                self.scope = Scope({}, outer)
                self.assign(node.for_in.target, item, node.for_in)
                items.append(self.ev(node.elt))
                self.scope = outer
            return Seq(kind, items, origin=self.origin("other", node))
        value, _ = self._comprehension(node, lambda: self.ev(node.elt))
        return Seq(kind, None, value, origin=self.origin("other", node))

    def _known_items(self, node: Any) -> list[Value] | None:
        comp: cst.CompFor = node.for_in
        if (
            comp.ifs
            or comp.inner_for_in is not None
            or not isinstance(comp.iter, (cst.Name, cst.Tuple, cst.List))
        ):
            return None
        source = self.ev(comp.iter)
        if isinstance(source, Seq) and source.items is not None and 0 < len(source.items) <= 6:
            return list(source.items)
        return None

    def ev_ListComp(self, node: cst.ListComp) -> Value:
        return self._sequence_of("list", node)

    def ev_SetComp(self, node: cst.SetComp) -> Value:
        return self._sequence_of("set", node)

    def ev_GeneratorExp(self, node: cst.GeneratorExp) -> Value:
        return self._sequence_of("iter", node)

    def ev_DictComp(self, node: cst.DictComp) -> Value:
        origin = self.origin("other", node)
        source = self._dict_items(node)
        if source is not None:
            # {k: v.to(device) for k, v in batch.items()}: each known entry by itself.
            result = Dict({}, origin=origin)
            for key, item in source.known().items():
                outer = self.scope
                self.scope = Scope({}, outer)
                self.assign(node.for_in.target, Seq("tuple", [Const(key), item]), node.for_in)
                made = self.ev(node.key)
                value = self.ev(node.value)
                self.scope = outer
                result.fields["items", made.value if isinstance(made, Const) else key] = value
            return result

        def finish() -> Value:
            self.ev(node.key)
            return self.ev(node.value)

        value, _ = self._comprehension(node, finish)
        return Dict({}, value, origin=origin)

    def _dict_items(self, node: cst.DictComp) -> Dict | None:
        comp = node.for_in
        if comp.ifs or comp.inner_for_in is not None or not isinstance(comp.iter, cst.Call):
            return None
        call = comp.iter.func
        if not isinstance(call, cst.Attribute) or call.attr.value != "items":
            return None
        source = self.ev(call.value)
        if isinstance(source, Dict) and source.fields["elem"] is None and source.known():
            return source
        return None
