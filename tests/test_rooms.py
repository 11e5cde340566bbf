"""The fence round the rooms of ``src``: who imports whom, and where private names of torch are."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "dtypepin"

#: From the ground up: each may import itself and those before it.
FLOORS = ("_base", "_pin", "_audit", "_advice", "trainers", "")
#: Private attributes that are read on modules, tensors and schemas outside ``torch_private.py``.
#: No public API gives them; torch's own documentation, or every serious library, uses them too.
ATTRIBUTES = {
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_compiled_call_impl",
    "_version",
    "_schema",
    "_generate_state_key",  # Lightning's, for the key of a callback in a checkpoint
}
MOST_LINES, MOST_LINES_OF_A_CLASS = 350, 200


def files(folder):
    return {path.relative_to(folder).with_suffix(""): path for path in folder.rglob("*.py")}


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(folder):
    """By each module, the modules of the package that it imports, wherever in the file."""
    package, known = folder.name, {}
    for name, path in files(folder).items():
        found = set()
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module)
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
        known[dotted(package, name)] = found
    return {name: {one for one in found if one in known} for name, found in known.items()}


def dotted(package, name):
    parts = [part for part in name.parts if part != "__init__"]
    return ".".join([package, *parts])


def floor(name):
    rest = name.split(".")[1:]
    return FLOORS.index(rest[0]) if rest and rest[0] in FLOORS else len(FLOORS) - 1


def upward(folder):
    known = imports(folder)
    return [f"{a} -> {b}" for a in known for b in known[a] if floor(b) > floor(a)]


def circles(folder):
    known = imports(folder)

    def reaches(start, end, seen):
        new = known[start] - seen
        return end in new or any(reaches(one, end, seen | new) for one in new)

    return [name for name in known if reaches(name, name, set())]


def private_names(folder):
    """Names of torch with an underscore, and such attributes, outside the one file."""
    found = []
    for name, path in files(folder).items():
        if name.name == "torch_private":
            continue
        own = names_with_underscore(tree(path))
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom):
                parts = [node.module, *(alias.name for alias in node.names)]
                if node.module.split(".")[0] == "torch":
                    found += [f"{name}: {p}" for p in parts if re.search(r"(^|\.)_[a-z]", p)]
            elif isinstance(node, ast.Attribute) and re.match(r"_[a-zA-Z]", node.attr):
                whole = ast.unparse(node)
                # Python's own frames have no public name.
                if node.attr not in ATTRIBUTES | own and not whole.startswith("sys._"):
                    found.append(f"{name}: {whole}")
    return found


def names_with_underscore(node):
    """What a file defines itself: its classes' attributes and methods, its functions."""
    found = set()
    for one in ast.walk(node):
        if isinstance(one, (ast.FunctionDef, ast.ClassDef)):
            found.add(one.name)
        elif isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
            found |= {one.attr} if ast.unparse(one.value) == "self" else set()
        elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Attribute):
            found.add(one.target.attr)
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            found.add(one.id)
    return found


def rooms_with_code(folder):
    """Rooms whose ``__init__`` holds more than the three sentences of their docstring."""
    found = []
    for room in FLOORS[:4]:
        path = folder / room / "__init__.py"
        if path.exists():
            node = tree(path)
            text = ast.get_docstring(node) or ""
            if len(node.body) != 1 or len(re.findall(r"\.(?:\s|$)", text)) != 3:
                found.append(room)
    return found


def too_long(folder):
    found = []
    for name, path in files(folder).items():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MOST_LINES:
            found.append(f"{name}: {lines} lines")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > MOST_LINES_OF_A_CLASS:
                    found.append(f"{name}: class {node.name}, {lines} lines")
    return found


CHECKS = [upward, circles, private_names, rooms_with_code, too_long]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_source_keeps_to_its_rooms(check):
    assert check(SOURCE) == []


ROOM = '"""A room.\n\nIt may import nothing.\nStart anywhere.\n"""\n'


@pytest.mark.parametrize(
    ("check", "broken"),
    [
        (upward, {"_base/a.py": "from dtypepin._pin import b", "_pin/b.py": ""}),
        (upward, {"_base/a.py": "def f():\n    import dtypepin._pin.b", "_pin/b.py": ""}),
        (upward, {"trainers/a.py": "from dtypepin import b", "b.py": ""}),
        (
            circles,
            {
                "_pin/a.py": "from dtypepin._pin import b",
                "_pin/b.py": "from dtypepin._pin.a import x",
            },
        ),
        (
            circles,
            {
                "_pin/a.py": "if TYPE_CHECKING:\n    from dtypepin._pin import b",
                "_pin/b.py": "from dtypepin._pin import c",
                "_pin/c.py": "from dtypepin._pin import a",
            },
        ),
        (private_names, {"_pin/a.py": "import torch\ntorch._C._is_tracing()"}),
        (private_names, {"_pin/a.py": "from torch._dynamo import config"}),
        (private_names, {"_pin/a.py": "from torch.nn.modules.module import _global_forward_hooks"}),
        (private_names, {"_pin/a.py": "module._backward_hooks"}),
        (rooms_with_code, {"_pin/__init__.py": ROOM + "from dtypepin._pin.a import b\n"}),
        (rooms_with_code, {"_pin/__init__.py": '"""A room."""\n'}),
        (too_long, {"_pin/a.py": "\n" * 351}),
        (too_long, {"_pin/a.py": "class A:\n" + "    x = 1\n" * 200}),
    ],
)
def test_each_check_can_fail(check, broken, tmp_path):
    folder = tmp_path / "dtypepin"
    fine = {
        "_base/__init__.py": ROOM,
        "_base/c.py": "x = 1\n",
        "_pin/d.py": "from dtypepin._base.c import x\nself._version, module._parameters\n",
        "_base/torch_private.py": "import torch\ntorch._C\n",
        "__init__.py": "from dtypepin._pin.d import x\n",
    }
    for texts in (fine, broken):
        for name, text in texts.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert bool(check(folder)) is (texts is broken)


def test_each_source_file_has_tests_that_are_found_by_its_name():
    """A file of its name, or a line in the table of tests/README.md."""
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    page = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    for name in files(SOURCE):
        if name.name != "__init__":
            file = f"{name}.py"
            assert f"test_{name.name}" in tests or f"`{file}`" in page, file
    for named in re.findall(r"`(test_\w+)\.py`", page):
        assert named in tests, f"tests/README.md names {named}.py, which is not there"


def named_in(page):
    """What a page names in backticks and code: files, tests and functions."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"[\w./]*\w+\.py(?:::\w+)?", text), re.findall(r"`(\w+\.\w+)`", text)


@pytest.mark.parametrize("page", ["README.md", "src/README.md", "tests/README.md"])
def test_what_the_pages_name_is_there(page):
    everywhere = {path.relative_to(ROOT).as_posix(): path for path in ROOT.rglob("*.py")}
    names, _ = named_in(page)
    for name in names:
        path, _, test = name.partition("::")
        found = [everywhere[one] for one in everywhere if f"/{one}".endswith(f"/{path}")]
        assert found, name
        assert not test or any(f"def {test}(" in one.read_text(encoding="utf-8") for one in found)
    assert names


def test_what_the_page_about_the_source_names_is_in_that_file():
    _, names = named_in("src/README.md")
    text = {path.stem: path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    classes = {
        one: part for part in text.values() for one in re.findall(r"^class (\w+)", part, re.M)
    }
    checked = [name for name in names if name.partition(".")[0] in text | classes]
    for name in checked:
        where, _, what = name.partition(".")
        if what != "py":
            assert re.search(rf"\b{what}\b", text.get(where) or classes[where]), name
    assert len(checked) >= 15
