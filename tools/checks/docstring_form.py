"""Do the docstrings say what the code does: every object, every parameter, every attribute?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import griffe

from tools import docstrings
from tools.checks.pages import docstring_texts
from tools.checks.result import Result
from tools.paths import pages, shown
from tools.snippet_files import folders

Kind = griffe.DocstringSectionKind
DIRECTIVE = re.compile(
    r"^::: (?P<path>[\w.]+)[ ]*$(?P<options>(?:\n[ ]{4,}.*|\n[ ]*$)*)", re.MULTILINE
)
NO_MEMBERS = re.compile(r"^\s+members: (?:false|\[\])\s*$", re.MULTILINE)
INHERITED = re.compile(r"^\s+inherited_members: true\s*$", re.MULTILINE)
ATTRIBUTES_ONLY = {"FlatParameter": "units call its methods; readers look at its attributes"}
"""Exported classes of which pages need not show the methods, each with its reason."""


@dataclass(frozen=True)
class Directive:
    """One `:::` line of a page.

    Attributes:
        path: The object it shows.
        whole: Whether its members are shown too.
        inherited: Whether members of its bases are.
        where: `file:line`.
    """

    path: str
    whole: bool
    inherited: bool
    where: str

    def objects(self, obj: griffe.Object) -> Iterator[griffe.Object]:
        """Yield what the page shows of the object that the path means."""
        yield from with_members(obj) if self.whole else [obj]
        if self.whole and self.inherited:
            yield from inherited(obj)


def directives(root: Path) -> list[Directive]:
    """Return what the pages show of the package."""
    found = []
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        for match in DIRECTIVE.finditer(text):
            line = text.count("\n", 0, match.start("path")) + 1
            whole = NO_MEMBERS.search(match["options"]) is None
            bases = INHERITED.search(match["options"]) is not None
            found.append(Directive(match["path"], whole, bases, f"{shown(page, root)}:{line}"))
    return found


def resolve(path: str, package: griffe.Module) -> griffe.Object | None:
    """Return the object that a dotted path means, where it is defined; None if there is none."""
    try:
        found = package[path.partition(".")[2]] if "." in path else package
        target = found.final_target if isinstance(found, griffe.Alias) else found
    except (KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError):
        return None
    assert isinstance(target, griffe.Object)
    return target


def shown_objects(root: Path, package: griffe.Module) -> list[griffe.Object]:
    """Return the public objects: those that a page shows, and those that the package exports."""
    found: dict[str, griffe.Object] = {}
    for directive in directives(root):
        obj = resolve(directive.path, package)
        if obj is not None:
            found |= {member.path: member for member in directive.objects(obj)}
    for name in exported(package):  # one that no page shows yet is reported by check_public
        obj = resolve(f"fsdp_ref.{name}", package)
        if obj is not None:
            found.setdefault(obj.path, obj)
    return list(found.values())


def exported(package: griffe.Module) -> list[str]:
    """Return the names in the package's `__all__`."""
    return [str(name).strip("'\"") for name in package.exports or []]


def with_members(obj: griffe.Object) -> Iterator[griffe.Object]:
    """Yield an object and the members a page shows with it: public ones, no submodules."""
    yield obj
    for name, member in obj.members.items():
        if not (member.is_alias or member.is_module or name.startswith("_")):
            assert isinstance(member, griffe.Object)
            yield from with_members(member)


def inherited(obj: griffe.Object) -> Iterator[griffe.Object]:
    """Yield the public members that a class has from bases in this package."""
    if isinstance(obj, griffe.Class):
        for name, member in obj.inherited_members.items():
            target = member.final_target
            if not name.startswith("_") and isinstance(target, griffe.Object):
                yield target


def check_public(root: Path) -> Result:
    """Check that every export is on a page, and every public object documented in full."""
    package = docstrings.load(root)
    public = shown_objects(root, package)
    on_pages: set[str] = set()
    problems = []
    for directive in directives(root):
        obj = resolve(directive.path, package)
        if obj is None:
            problems.append(f"{directive.where}: there is no {directive.path} in the package")
            continue
        on_pages |= {member.path for member in directive.objects(obj)}
    for name in exported(package):
        obj = resolve(f"fsdp_ref.{name}", package)
        if obj is None or obj.path not in on_pages:
            path = obj.path if obj else f"fsdp_ref.{name}"
            problems.append(f"fsdp_ref/__init__.py:1: {name} is on no page; add `::: {path}`")
        elif name not in ATTRIBUTES_ONLY:
            problems += [
                f"{docstrings.place(member, root)}: {name}.{member.name} is on no page; show it "
                f"with {name}, or give it a name that begins with an underscore"
                for member in (*with_members(obj), *inherited(obj))
                if member.is_function and member.path not in on_pages
            ]
    for obj in public:
        where = docstrings.place(obj, root)
        problems += [f"{where}: {obj.path}: {fault}" for fault in public_faults(obj)]
    return Result(f"{len(public)} public objects", problems)


def public_faults(obj: griffe.Object) -> Iterator[str]:
    """Yield what a public object's docstring lacks."""
    if obj.docstring is None:
        if not (isinstance(obj, griffe.Attribute) and documented_by_class(obj)):
            yield "has no docstring; say what it is for and who must call it"
        return
    if isinstance(obj, griffe.Function) and "property" not in obj.labels:
        for name in sorted(parameters(obj) - documented(obj, Kind.parameters)):
            yield f"parameter {name} is not under `Args:`"
    if isinstance(obj, griffe.Class):
        yield from class_faults(obj)


def class_faults(obj: griffe.Class) -> Iterator[str]:
    """Yield constructor parameters and public attributes that a class leaves out."""
    said = documented(obj, Kind.parameters) | documented(obj, Kind.attributes)
    said |= {name for name, member in obj.members.items() if member.has_docstring}
    initialiser = obj.members.get("__init__")
    if isinstance(initialiser, griffe.Function):
        said |= documented(initialiser, Kind.parameters)
        missing = parameters(initialiser) - said
    else:
        missing = fields(obj) - said if "dataclass" in obj.labels else set()
    for name in sorted(missing):
        yield f"parameter {name} is not under `Args:` or `Attributes:`"
    listed = documented(obj, Kind.attributes)
    if listed:
        for name in sorted(public_attributes(obj) - said):
            yield f"attribute {name} is not under `Attributes:`"


def documented_by_class(obj: griffe.Attribute) -> bool:
    """Tell whether an attribute needs no docstring of its own."""
    parent = obj.parent
    if not isinstance(parent, griffe.Class):
        return False
    if obj.name in documented(parent, Kind.attributes) | documented(parent, Kind.parameters):
        return True
    # `code` of an error class: explained once, at the base.
    return any(obj.name in base.members for base in parent.mro()) or obj.name == "code"


def public_attributes(obj: griffe.Class) -> set[str]:
    """Return the names of a class's public attributes; properties document themselves."""
    members = obj.members.items()
    plain = {n for n, m in members if m.is_attribute and "property" not in m.labels}
    return {name for name in plain if not name.startswith("_")}


def fields(obj: griffe.Class) -> set[str]:
    """Return the names of a dataclass's public fields."""
    return {
        name for name in public_attributes(obj) if getattr(obj.members[name], "annotation", None)
    }


def parameters(obj: griffe.Function) -> set[str]:
    """Return a function's parameter names, without `self` and `cls`, stars removed."""
    names = [parameter.name for parameter in obj.parameters]
    method = isinstance(obj.parent, griffe.Class) and "staticmethod" not in obj.labels
    return {name for name in (names[1:] if method and names else names) if not name.startswith("_")}


def documented(obj: griffe.Object, kind: griffe.DocstringSectionKind) -> set[str]:
    """Return the names listed in the sections of one kind."""
    return {
        item.name.lstrip("*")
        for section in docstrings.sections(obj)
        if section.kind is kind
        for item in section.value
    }


def check_names(root: Path) -> Result:
    """Check that every name under `Args:` and `Attributes:` exists, in private code too."""
    package = docstrings.load(root)
    problems = []
    count = 0
    for obj in docstrings.objects(package):
        for name, exists in listed_names(obj):
            count += 1
            if not exists:
                problems.append(
                    f"{docstrings.place(obj, root)}: {obj.path} documents {name}, which the code "
                    "does not have; rename it as in the code"
                )
    return Result(f"{count} documented names", problems)


def listed_names(obj: griffe.Object) -> Iterator[tuple[str, bool]]:
    """Yield each documented parameter and attribute, and whether the code has it."""
    if isinstance(obj, griffe.Class | griffe.Function):
        known = {parameter.name.lstrip("*") for parameter in obj.parameters}
        if isinstance(obj, griffe.Class) and "__new__" in obj.members:
            known |= {p.name for p in getattr(obj.members["__new__"], "parameters", [])}
        for name in sorted(documented(obj, Kind.parameters)):
            yield name, name in known
    for name in sorted(documented(obj, Kind.attributes)):
        yield name, has_attribute(obj, name)


def has_attribute(obj: griffe.Object, name: str) -> bool:
    """Tell whether a class, a base of it in this package, or a module has an attribute."""
    if isinstance(obj, griffe.Class):
        return any(name in kind.members for kind in [obj, *obj.mro()])
    return name in obj.members


def check_tips(root: Path) -> Result:
    """Check that every tip is collected, proved, and given by an object on a page."""
    package = docstrings.load(root)
    public = {obj.path for obj in shown_objects(root, package)}
    keys = {f"{folder.parent.name}/{folder.name}" for folder in folders(root)}
    tips = docstrings.tips(package)
    problems = list(uncollected(root, package))
    for tip in tips:
        where = docstrings.place(tip.obj, root)
        if tip.proof is None:
            problems.append(
                f"{where}: the tip '{tip.title}' has no proof; end it with `Proof: page/name`"
            )
        elif tip.proof not in keys:
            problems.append(f"{where}: the tip '{tip.title}': there is no snippet {tip.proof}")
        if tip.obj.path not in public:
            problems.append(
                f"{where}: {tip.obj.path} gives a tip and is on no page; "
                "move the tip to an object that readers see"
            )
    return Result(f"{len(tips)} tips", problems)


def uncollected(root: Path, package: griffe.Module) -> Iterator[str]:
    """Yield docstring lines that begin with `Tip` and are no collected tip.

    Four spellings vanish without a warning: no blank line before the heading, a blank line
    after it, a body that is not indented, and a heading directly after `Args:`.
    """
    collected: dict[tuple[str, int], int] = {}
    for obj in docstrings.objects(package):
        if obj.docstring is not None and obj.docstring.lineno is not None:
            key = (str(obj.filepath), obj.docstring.lineno)
            collected[key] = len(docstrings.tips_of(obj))
    for text in docstring_texts(root):
        lines = [i for i, line in enumerate(text.lines) if re.match(r"\s*Tips?\b", line)]
        if len(lines) != collected.get((str(text.path), text.first_line), 0):
            yield (
                f"{text.at(lines[0] if lines else 0, root)}: a line begins with 'Tip' and is not "
                "collected as one; write `Tip: Title` with a blank line before it, none after it, "
                "an indented body, and not inside another section"
            )
