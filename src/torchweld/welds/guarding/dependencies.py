"""Finds what a module's result depends on besides its arguments and tensors, as facts to compare.

In: a module and the functions that ran when it was called (`executed_code`). Out: `Facts`. The
search begins here, at the modules of the block and at the globals, imports and owners of the
functions that ran; `reached_objects` follows it from object to object. Every name in the bytecode
of these functions is looked up on every object they can reach. So nothing that was read is missed,
whatever variables it went through. An attribute that was not read counts too if its name occurs in
the code.
"""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from torchweld.welds.guarding.bytecode_names import names_of
from torchweld.welds.guarding.dependency_facts import (
    ABSENT,
    NAMELESS,
    PRESENT,
    Facts,
    Items,
    ModulePart,
    Name,
    Tie,
    items_of,
    looked_up,
)
from torchweld.welds.guarding.executed_code import Ran, is_users
from torchweld.welds.guarding.held_functions import homes
from torchweld.welds.guarding.questions_asked import TABLES_OF_TENSORS, asked_modes, asks_sizes
from torchweld.welds.guarding.reached_objects import BOOKKEEPING, ReachedObjects, place_of_name
from torchweld.welds.guarding.unchanging_values import is_constant
from torchweld.welds.refusal_reasons import Refused, place_of_line

MOST_FACTS = 400  # more would take too long to compare at every call


def facts_of(
    module: nn.Module,
    ran: Sequence[Ran],
    called: frozenset[str] = frozenset(),
    kind_of: Callable[[type], type] = lambda kind: kind,
) -> Facts:
    """Everything that `ran`, recorded while `module` was called, can have read.

    called:  names of the C functions that were called
    kind_of: gives the original class of a module's class, which may be a welded one
    """
    return _DependencySearch(module, ran, called, kind_of).facts()


class _DependencySearch:
    """A search from the modules of a block and the functions that ran."""

    def __init__(
        self,
        module: nn.Module,
        ran: Sequence[Ran],
        called: frozenset[str],
        kind_of: Callable[[type], type],
    ) -> None:
        self._ran, self._called, self._kind_of = ran, called, kind_of
        self._codes = {one.code for one in ran}
        self._paths = {inner: path for path, inner in module.named_modules()}
        self._reached = ReachedObjects(self._codes, self._paths)
        self._methods: set[tuple[type, types.CodeType]] = set()
        self._parts: list[ModulePart] = []
        self._switched: list[str] = []

    def facts(self) -> Facts:
        modes = asked_modes(self._codes, self._called)
        for module, path in self._paths.items():
            self._module(module, path)
        for one in self._ran:
            self._ran_one(one)
        self._check_explained()
        found = Facts(
            parts=tuple(self._parts),
            entries=tuple(self._reached.entries),
            items=tuple(self._reached.items),
            kinds=tuple(self._reached.kinds),
            classes=tuple(self._reached.classes.values()),
            functions=tuple(self._reached.functions),
            cells=tuple(self._reached.cells),
            modes=modes,
            switched=tuple(self._switched),
            ties=tuple(self._ties()),
            asks_sizes=asks_sizes(self._codes, self._called),
        )
        if len(self._reached.entries) + len(self._reached.items) > MOST_FACTS:
            raise Refused(f"depends on more than {MOST_FACTS} things that can change")
        return found

    # ---- functions that ran ----

    def _ran_one(self, one: Ran) -> None:
        names = names_of(one.code)
        users = is_users(one.code.co_filename)
        for name in (*names.stored_globals, *self._stored_outside(one.code)):
            raise Refused(
                f"sets {name}, which outlives the call", where=place_of_name(one.code, name)
            )
        owner = one.first
        if owner is not None and not isinstance(owner, Tensor) and not is_constant(owner):
            kind = owner if isinstance(owner, type) else self._kind_of(type(owner))
            self._method(kind, one.code)
            if isinstance(owner, type) and users:
                self._reached.note_class(owner)
        if not users:
            return
        for name in names.globals:
            self._global(one, name)
        for name in names.imports:
            known, where = sys.modules.get(name), place_of_name(one.code, name)
            if known is None:
                raise Refused(f"imports {name}, which cannot be watched", where=where)
            self._reached.note_entry(None, "", sys.modules, name, known, f"module {name}")
            self._reached.note_value(known, f"module {name}", where)

    def _stored_outside(self, code: types.CodeType) -> list[str]:
        """Free variables the code sets that belong to no function that ran."""
        around = {
            name for other in self._codes if code in other.co_consts for name in other.co_cellvars
        }
        return [name for name in names_of(code).stored_free if name not in around]

    def _method(self, kind: type, code: types.CodeType) -> None:
        """Notes the method of a class that has this code."""
        if (kind, code) in self._methods:
            return
        self._methods.add((kind, code))
        for base, name in homes(kind, code):
            self._reached.note_class(base, (name,))
            self._reached.note_class(kind, (name,))
            self._reached.note_function(base.__dict__[name], f"{base.__name__}.{name}", "")

    def _global(self, one: Ran, name: str) -> None:
        where, space = place_of_name(one.code, name), one.globals
        home = space.get("__name__", "?")
        what = f"global {name} of {home}"
        value = space.get(name, ABSENT)
        if not self._reached.note_entry(None, "", space, name, value, what):
            return
        if value is not ABSENT:
            self._reached.note_value(value, what, where)
        else:
            found = vars(builtins).get(name, ABSENT)
            self._reached.note_entry(None, "", vars(builtins), name, found, f"builtin {name}")
            self._reached.note_value(found, f"builtin {name}", where)

    def _check_explained(self) -> None:
        """Raises Refused if no fact leads to a function that ran: it could be replaced unseen."""
        for one in self._ran:
            code = one.code
            if code in self._reached.explained or not is_users(code.co_filename):
                continue
            raise Refused(
                f"runs {code.co_name}, which was reached in a way that cannot be watched",
                where=place_of_line(code, code.co_firstlineno),
            )

    # ---- modules of the block ----

    def _module(self, module: nn.Module, path: str) -> None:
        what, own, kind = path or NAMELESS, module.__dict__, self._kind_of(type(module))
        children = tuple(
            (name, None if child is None else self._paths[child])
            for name, child in module._modules.items()
        )
        self._parts.append(ModulePart(path, kind, children))
        self._reached.note_class(kind)
        if path:  # a forward set on the block's own module replaces the welded one, or calls it
            self._reached.note_entry(path, "__dict__", None, "forward", ABSENT, f"{what}.forward")
        if "training" in self._reached.names:
            self._switched.append(path)
        for table in ("_parameters", "_buffers") if TABLES_OF_TENSORS & self._reached.names else ():
            held = own[table]
            self._reached.items.append(
                Items(held, items_of(held), f"the {table.strip('_')} of {what}")
            )
        by_hand = looked_up(kind, "__getattr__") is not nn.Module.__getattr__
        for name in sorted(self._reached.names - BOOKKEEPING - {"forward"}):
            named = f"{path}.{name}" if path else name
            if name in own:
                if self._reached.note_entry(path, "__dict__", None, name, own[name], named):
                    self._reached.note_value(own[name], named, self._reached.where(name))
                continue
            in_class = looked_up(kind, name) is not ABSENT
            kept = next((t for t in ("_parameters", "_buffers") if name in own[t]), None)
            if kept is not None:
                state = None if own[kept][name] is None else PRESENT
                self._reached.note_entry(path, kept, None, name, state, named)
            missing = kept is None and name not in module._modules and not in_class
            may_miss = name in self._reached.may_miss or by_hand
            if not missing or may_miss:
                self._reached.note_entry(path, "__dict__", None, name, ABSENT, named)
            if missing and may_miss:
                for table in ("_parameters", "_buffers"):
                    self._reached.note_entry(path, table, None, name, ABSENT, named)

    def _ties(self) -> Iterator[Tie]:
        """Names of tied tensors: a block has one name per tensor; the others have to stay tied."""
        first: dict[int, Name] = {}
        for module, path in self._paths.items():
            for table in ("_parameters", "_buffers"):
                for key, tensor in module.__dict__[table].items():
                    if tensor is not None:
                        name = Name(path, table, key)
                        known = first.setdefault(id(tensor), name)
                        if known != name:
                            yield Tie(known, name, f"{path}.{key}" if path else key)
