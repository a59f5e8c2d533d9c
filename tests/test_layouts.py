# SPDX-License-Identifier: Apache-2.0
"""The same files work flat and inside a package, with nothing but the standard library behind them.

Most of this reads or copies the project's own files, so it runs in a checkout only. The vendored copy is given what it
will meet in torch_tpu's folder: neighbours whose names are those of standard modules, and strangers on `sys.path` with
the names of our own modules. All of them raise when they are imported.
"""

import ast
import faulthandler
import os
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from layout import PACKAGE, PROJECT, TESTS

pytestmark = [pytest.mark.flat_only, pytest.mark.skipif(bool(PACKAGE), reason="reads the checkout's own files")]

VENDORED = "vendored.internal.distributed"
# Not part of what is vendored.
TOOLS = ("bench.py",)
MODULES = sorted(path for path in PROJECT.glob("*.py") if path.name not in TOOLS)
PURE_MODULES = ("_protocol", "_consensus")
IMPURE_IMPORTS = frozenset({"asyncio", "multiprocessing", "selectors", "socket", "subprocess", "threading", "time"})

# The whole suite once more; it takes as long as the first time.
VENDORED_SUITE_TIMEOUT_S = 400


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _module_level(tree: ast.Module) -> list[ast.stmt]:
    """The statements that run at import: all but the bodies of functions, and of `if TYPE_CHECKING`."""
    found: list[ast.stmt] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        if isinstance(node, ast.stmt):
            found.append(node)
        waiting.extend(ast.iter_child_nodes(node))
    return found


def _imported(statements: list[ast.stmt]) -> set[str]:
    """The full names of the modules that `statements` import; our own ones, relative or not, by their bare name."""
    names: set[str] = set()
    for node in statements:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.name for alias in node.names)
    return names


def _tops(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


@pytest.fixture(scope="module")
def vendored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to put on `sys.path` which holds our files as `vendored.internal.distributed`, among decoys."""
    root = tmp_path_factory.mktemp("vendored")
    package = root.joinpath(*VENDORED.split("."))
    package.mkdir(parents=True)
    for folder in (package, *list(package.parents)[: VENDORED.count(".")]):
        folder.joinpath("__init__.py").write_text("")
    for module in MODULES:
        shutil.copy(module, package)
    for name in ("multiprocessing", "distributed", "logging", "socket", "selectors", "struct", "tempfile"):
        _write_decoy(package / f"{name}.py")
    for module in MODULES:
        _write_decoy(root / module.name)
    return root


def _write_decoy(path: Path) -> None:
    path.write_text(f"raise AssertionError('a stranger was imported: ' + {str(path)!r})\n")


def _environment(import_folder: Path, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_TPU_INTERNAL_")}
    return kept | {"PYTHONPATH": str(import_folder)} | variables


def test_every_module_is_packaged() -> None:
    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    assert sorted(settings["tool"]["setuptools"]["py-modules"]) == sorted(path.stem for path in MODULES)


def test_suite_passes_on_a_vendored_copy(vendored: Path, tmp_path: Path) -> None:
    faulthandler.cancel_dump_traceback_later()  # this one takes long; it has a limit of its own
    suite = [
        *(sys.executable, "-P", "-m", "pytest", "-c", str(PROJECT / "pyproject.toml"), "--rootdir", str(PROJECT)),
        *("-q", "-p", "no:cacheprovider", "-m", "not flat_only", str(TESTS)),
    ]
    flat = subprocess.run(
        [*suite, "--collect-only"], cwd=PROJECT, capture_output=True, text=True, timeout=VENDORED_SUITE_TIMEOUT_S
    )
    assert flat.returncode == 0, flat.stdout + flat.stderr
    expected = {line for line in flat.stdout.splitlines() if "::" in line}
    assert expected, "the suite has tests to run on a vendored copy"

    report = tmp_path / "report.xml"
    copy = subprocess.run(
        [*suite, f"--junitxml={report}", "-o", "junit_family=xunit1"],
        cwd=tmp_path,
        env=_environment(vendored, HANDSHAKE_PACKAGE=VENDORED),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=VENDORED_SUITE_TIMEOUT_S,
    )
    if copy.returncode:
        print("\n".join(copy.stdout.splitlines()[-80:]))
    assert copy.returncode == 0, "the suite fails on a vendored copy; its output is above"
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    passed = [case for case in cases if case.find("skipped") is None]
    assert len(cases) == len(expected), "as many tests as in the flat layout"
    assert passed, "some test passed"


_LIST_STRANGERS = """
import sys
before = set(sys.modules)
{statement}
assert handshake.Handshake
own = {own!r}
strangers = sorted(
    name for name in set(sys.modules) - before
    if name.partition(".")[0] not in sys.stdlib_module_names and name not in own
)
assert not strangers, strangers
assert not [name for name in sys.modules if name.partition(".")[0] == "dataclasses"], "slow to import"
"""


@pytest.mark.parametrize("layout_name", ["flat", "package"])
def test_import_takes_nothing_outside_the_standard_library(layout_name: str, vendored: Path, tmp_path: Path) -> None:
    stems = {path.stem for path in MODULES}
    if layout_name == "flat":
        folder, statement, own = PROJECT, "import handshake", stems
    else:
        parents = {"vendored", "vendored.internal", VENDORED}
        folder, statement = vendored, f"from {VENDORED} import handshake"
        own = parents | {f"{VENDORED}.{stem}" for stem in stems}
    program = _LIST_STRANGERS.format(statement=statement, own=own)
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, cwd=tmp_path, env=_environment(folder), capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("name", PURE_MODULES)
def test_protocol_and_state_machine_touch_no_socket_thread_or_clock(name: str) -> None:
    own = {path.stem: path for path in MODULES}
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        # Function bodies count as well: an import inside one is an import.
        imported = _tops(_imported([node for node in ast.walk(_parse(own[module])) if isinstance(node, ast.stmt)]))
        assert not imported & IMPURE_IMPORTS, f"{module}.py"
        waiting.extend(imported & own.keys())
    assert seen


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_no_third_party_import_at_module_level(path: Path) -> None:
    allowed = sys.stdlib_module_names | {module.stem for module in MODULES}
    assert _tops(_imported(_module_level(_parse(path)))) <= allowed


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_own_modules_are_imported_by_layout_not_by_trial(path: Path) -> None:
    own = {module.stem for module in MODULES}
    tree = _parse(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            caught = " ".join(ast.unparse(handler.type) for handler in node.handlers if handler.type is not None)
            guarded = _tops(_imported([child for child in ast.walk(node) if isinstance(child, ast.stmt)]))
            if "ImportError" in caught or "ModuleNotFoundError" in caught:
                assert not guarded & own, f"line {node.lineno}: branch on `if __package__:`"
    # Every import of our own is in one of the two branches, relative in the first and absolute in the second.
    branches = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "__package__"]
    relative = {id(child) for branch in branches for node in branch.body for child in ast.walk(node)}
    absolute = {id(child) for branch in branches for node in branch.orelse for child in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert id(node) in relative, f"line {node.lineno}: a relative import outside `if __package__:`"
        elif isinstance(node, ast.Import | ast.ImportFrom) and _tops(_imported([node])) & own:
            assert id(node) in absolute, f"line {node.lineno}: an absolute import of our own outside its `else:`"


# Modules that CPython has gained since 3.11, which `sys.stdlib_module_names` of an older interpreter does not list.
# A flat module of such a name is never found: the interpreter has imported its own before it looks at the path.
NEWER_STANDARD_MODULES = frozenset(
    {"_colorize", "_hmac", "_interpreters", "_opcode_metadata", "_types", "_zstd", "annotationlib", "compression"}
)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_no_module_has_the_name_of_a_standard_one(path: Path) -> None:
    assert path.stem not in sys.stdlib_module_names | NEWER_STANDARD_MODULES


@pytest.mark.parametrize(
    "path",
    sorted([*PROJECT.glob("*.py"), *TESTS.glob("*.py"), *PROJECT.glob("examples/*.py")]),
    ids=lambda path: path.relative_to(PROJECT).as_posix(),
)
def test_every_file_names_its_licence_first(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# SPDX-License-Identifier: Apache-2.0\n")
