# SPDX-License-Identifier: Apache-2.0
"""What the documents say that can be checked is checked: files, lines, imports, settings, messages, the quick start.

The line counts in VENDORING.md change with the code; `python tests/test_documents.py` writes them anew.
"""

import ast
import functools
import inspect
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from layout import FOLDER, PACKAGE, PROJECT, child_environment, load, run

pytestmark = [
    pytest.mark.flat_only,
    pytest.mark.skipif(bool(PACKAGE) or FOLDER != PROJECT, reason="reads the checkout's own files"),
]

DOCUMENTS = ("README.md", "MESSAGES.md", "DESIGN.md", "VENDORING.md", "CHANGELOG.md")
MOST_LINES_OF_README = 250
MOST_COLUMNS = 120
PATIENCE_S = 60.0

# ---------------------------------------------------------------------- what is read


def read(name: str) -> str:
    return (PROJECT / name).read_text(encoding="utf-8")


def modules() -> dict[str, str]:
    """The text of each file that is vendored, by its name."""
    return {path.name: read(path.name) for path in sorted(PROJECT.glob("*.py")) if path.name != "bench.py"}


def tables(document: str, section: str = "") -> Iterator[list[str]]:
    """The cells of each row of the tables in a document, or in one section of it; without heads and rules."""
    text = read(document)
    if section:
        assert f"## {section}\n" in text, f"{document} has no section {section!r}"
        text = re.split(r"^## ", text.partition(f"## {section}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        for row in table.splitlines()[2:]:
            yield [cell.strip() for cell in row.strip("|").split("|")]


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


# ---------------------------------------------------------------------- files

FILE_ROW = re.compile(r"^\| `(?P<name>\w+\.py)` \| (?P<lines>\d+) \|", re.MULTILINE)
TOTAL_ROW = re.compile(r"^\| all (?P<which>\w+) \| (?P<lines>\d+) \|", re.MULTILINE)


def with_line_counts(vendoring: str) -> str:
    """The document with the lines that the files have now. A total is that of the table that it closes."""
    lines = {name: len(text.splitlines()) for name, text in modules().items()}

    def count(table: re.Match[str]) -> str:
        total = 0

        def of_file(row: re.Match[str]) -> str:
            nonlocal total
            total += lines[row["name"]]
            return f"| `{row['name']}` | {lines[row['name']]} |"

        counted = FILE_ROW.sub(of_file, table[0])
        return TOTAL_ROW.sub(lambda row: f"| all {row['which']} | {total} |", counted)

    return re.sub(r"(?:^\|.*\n)+", count, vendoring, flags=re.MULTILINE)


def test_vendoring_lists_the_files_to_copy_and_how_long_they_are() -> None:
    vendoring = read("VENDORING.md")
    assert sorted(row["name"] for row in FILE_ROW.finditer(vendoring)) == list(modules())
    assert len(TOTAL_ROW.findall(vendoring)) == 2
    assert vendoring == with_line_counts(vendoring), "run `python tests/test_documents.py`"


def imports(text: str, in_functions: bool = True) -> set[str]:
    """Which of our own modules a file imports, but for type checking."""
    ours = {name.removesuffix(".py") for name in modules()}
    found = set[str]()
    waiting: list[ast.AST] = [ast.parse(text)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} if node.module else {alias.name for alias in node.names}
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
        elif in_functions or not isinstance(node, ast.FunctionDef):
            waiting += ast.iter_child_nodes(node)
    return found & ours


def test_design_says_what_each_file_imports() -> None:
    rows = {row[0].strip("`"): row for row in tables("DESIGN.md", "The files")}
    assert sorted(rows) == list(modules())
    for name, text in modules().items():
        assert set(code_spans(rows[name][2])) == imports(text), name


def test_vendoring_says_which_files_an_extra_needs() -> None:
    """All that it imports when it is imported, directly or not, beside the core."""
    core = {code_spans(row[0])[0] for row in tables("VENDORING.md", "The core") if code_spans(row[0])}
    extras = {code_spans(row[0])[0]: row for row in tables("VENDORING.md", "The extras") if code_spans(row[0])}
    for name, row in extras.items():
        wanted, more = set[str](), {name}
        while more:
            wanted |= more
            texts = [read(file) for file in more]
            more = {f"{module}.py" for text in texts for module in imports(text, in_functions=False)} - wanted
        assert set(code_spans(row[3])) == wanted - core - {name}, name


# ---------------------------------------------------------------------- settings and names


def test_readme_lists_every_variable_and_its_default() -> None:
    code = "".join(modules().values())
    used = set(re.findall(r"TORCH_TPU_(?:INTERNAL|SPMD)_HANDSHAKE_[A-Z_]+", code))
    rows = {row[0]: row for row in tables("README.md", "Settings")}
    assert set(re.findall(r"TORCH_TPU_\w+", " ".join(rows))) == used
    rendezvous = load("_rendezvous")
    assert rows[f"`{rendezvous.TIMEOUT_VARIABLE}`"][2] == f"{rendezvous.DEFAULT_TIMEOUT_S:g}"
    assert rows[f"`{rendezvous.PORT_VARIABLE}`"][2].endswith(str(rendezvous.DEFAULT_PORT))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_variables_that_are_named_exist(document: str) -> None:
    code = "".join(modules().values()) + read("tests/layout.py")
    for name in re.findall(r"\b(?:TORCH_TPU|HANDSHAKE)_[A-Z_]+", read(document)):
        if name != "TORCH_TPU_INTERNAL_MATERIALIZE_COLLECTIVE_TENSORS":  # torch_tpu's own
            assert name in code, name


def test_readme_lists_every_keyword() -> None:
    listed = [span for row in tables("README.md", "Settings") if "TORCH" not in row[0] for span in code_spans(row[0])]
    keywords = set(inspect.signature(load("handshake").Handshake).parameters)
    assert {span for span in listed if span.islower()} == keywords


def test_messages_lists_every_exception() -> None:
    rows = list(tables("MESSAGES.md", "Exceptions"))
    listed = {code_spans(row[0])[0] for row in rows if row[0]}
    assert listed == {name for name in load("handshake").__all__ if name.endswith("Error")} | {"PlanError"}
    for row in rows:
        for name, *bases in [code_spans(row[0])] if row[0] else []:
            module = load("_graph_plan" if name == "PlanError" else "handshake")
            for base in [base for base in bases if base.endswith("Error")]:
                assert base in [each.__name__ for each in getattr(module, name).__mro__], (name, base)


def test_names_that_the_examples_import_exist() -> None:
    for document in ("README.md", "VENDORING.md"):
        for block in re.findall(r"```python\n(.*?)```", read(document), re.DOTALL):
            for node in ast.walk(ast.parse(block.replace("\n    ...", ""))):
                if isinstance(node, ast.ImportFrom) and f"{node.module}.py" in modules():
                    for alias in node.names:
                        assert hasattr(load(str(node.module)), alias.name), alias.name


# ---------------------------------------------------------------------- messages

# In a message, what is not the same each time; and in the code, what stands for it.
VALUE = re.compile(
    r"ranks? \d+(?:-\d+)?(?:, \d+(?:-\d+)?)*|\[[^\[\]]*\]|\(?\bhost:pid\)?|\b(?:PID-NUMBER|NUMBER|FOLDER|REASON)\b"
    r"|…|\b[0-9a-f]{8,}\b|\b\d+(?:\.\d+)*\b|%[sd]|\0"
)
PUNCTUATION = re.compile(r"[.:;,()\[\]`'\"=]+(?=\s|\0|$)|(?<=\s)[(\[`'\"=]+")


def clauses(message: str) -> list[str]:
    """The stretches of words in a message that are the same each time."""
    text = re.sub(r"\b(?:rank )?\0", "\0", VALUE.sub("\0", message))
    return [" ".join(part.split()) for part in re.split(r"\0", PUNCTUATION.sub("\0", text)) if part.strip()]


def literals(tree: ast.AST) -> Iterator[str]:
    """The texts in a program but for docstrings; what an f-string fills in is \\0."""
    inside = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            inside.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


@functools.cache
def said_by_the_code() -> str:
    """All clauses of all texts in the code, a line each, with a space on both sides."""
    texts = [each for text in modules().values() for each in literals(ast.parse(text))]
    return "\n".join(f" {clause} " for each in texts for clause in clauses(each))


def documented_messages() -> list[str]:
    columns = {"Why a vote was split": 0, "Exceptions": 1, "Refusals": 0, "Other messages": 0, "The report": 0}
    rows = [(row, column) for section, column in columns.items() for row in tables("MESSAGES.md", section)]
    return [message for row, column in rows for message in code_spans(row[column])]


def words_of_the_code(words: list[str]) -> int:
    """How many of the words the code says, two or more of them together. Names that it fills in it does not say."""
    said = start = 0
    while start < len(words):
        end = next((end for end in range(len(words), start + 1, -1) if is_said(words[start:end])), start)
        said += end - start
        start = max(end, start + 1)
    return said


def is_said(words: list[str]) -> bool:
    return f" {' '.join(words)} " in said_by_the_code()


@pytest.mark.parametrize("message", documented_messages() if not PACKAGE else [])
def test_a_documented_message_is_one_of_the_code(message: str) -> None:
    all_clauses = [clause.split() for clause in clauses(message)]
    assert all_clauses, "there is nothing in it that can be looked for"
    telling = [words for words in all_clauses if len(words) > 2]
    for words in telling:
        assert words_of_the_code(words) >= 2 / 3 * len(words), " ".join(words)
    assert telling or all(map(is_said, all_clauses))


def test_every_warning_of_the_code_is_documented() -> None:
    documented = "\n".join(clause for message in documented_messages() for clause in clauses(message))
    missing = []
    for name, text in modules().items():
        for call in ast.walk(ast.parse(text)):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not call.args:
                continue
            if call.func.attr in ("warning", "critical", "_tell"):
                words = [clause for each in literals(call.args[0]) for clause in clauses(each) if clause.count(" ") > 1]
                if words and not any(clause in documented for clause in words):
                    missing.append(f"{name}:{call.lineno}: {words[0]}")
    assert not missing


# ---------------------------------------------------------------------- the rest


def test_the_quick_start_runs_as_pasted(tmp_path: Path) -> None:
    program = read("README.md").partition("## Quick start")[2].partition("```python\n")[2].partition("```")[0]
    assert "port=36500" in program
    for _ in range(5):  # as long as somebody else takes the port in between
        with socket.create_server(("localhost", 0)) as found:
            port = found.getsockname()[1]
        (tmp_path / "start.py").write_text(program.replace("36500", str(port)), encoding="utf-8")
        finished = run([sys.executable, "start.py"], PATIENCE_S, env=child_environment(), cwd=tmp_path)
        if "can't be used" not in finished.stdout:
            break
    told = sorted(re.findall(r"rank \d: \[.*?\]", finished.stdout))  # two processes print: lines may run together
    assert told == ["rank 0: [True, False]", "rank 1: [True, False]"], finished.stdout


def test_the_story_is_the_one_that_the_example_tells() -> None:
    story = read("README.md").partition("## The story of a split")[2].partition("\n## ")[0]
    steps = re.findall(r"^    (\d\. .*)$", story, re.MULTILINE)
    assert len(steps) == 4
    for step in steps:
        assert step in read("examples/vocab_parallel.py")


def test_the_commands_that_start_a_checkout_are_in_the_readme() -> None:
    for command in ("python bench.py", "python -m pip install -r tests/requirements.txt && python -m pytest"):
        assert f"\n    {command}\n" in read("README.md")


def test_readme_is_short() -> None:
    assert len(read("README.md").splitlines()) <= MOST_LINES_OF_README


def test_the_newest_version_in_the_changelog_is_that_of_the_package() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', read("pyproject.toml"), re.MULTILINE)
    assert re.findall(r"^## \[(\d.*?)\]", read("CHANGELOG.md"), re.MULTILINE)[0] == version


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", read(document)):
        assert target.startswith("https://") or (PROJECT / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paragraphs_are_folded(document: str) -> None:
    for line in read(document).splitlines():
        assert len(line) <= MOST_COLUMNS or line.startswith(("|", "    ")), line


if __name__ == "__main__":
    (PROJECT / "VENDORING.md").write_text(with_line_counts(read("VENDORING.md")), encoding="utf-8")
