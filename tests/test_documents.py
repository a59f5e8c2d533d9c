# SPDX-License-Identifier: Apache-2.0
"""The documents keep up with the code: files, settings, exceptions and keywords that they list are those that exist."""

import inspect
import re
import socket
import sys
from pathlib import Path

import pytest
from layout import PACKAGE, PROJECT, child_environment, load, run

pytestmark = [pytest.mark.flat_only, pytest.mark.skipif(bool(PACKAGE), reason="reads the checkout's own files")]

DOCUMENTS = ("README.md", "MESSAGES.md", "DESIGN.md", "VENDORING.md", "CHANGELOG.md")
PATIENCE_S = 60.0


def read(name: str) -> str:
    return (PROJECT / name).read_text(encoding="utf-8")


def modules() -> list[Path]:
    return sorted(path for path in PROJECT.glob("*.py") if path.name != "bench.py")


def test_vendoring_lists_the_files_to_copy_and_how_long_they_are() -> None:
    listed = re.findall(r"^\| `(\w+\.py)` \| (\d+) \|", read("VENDORING.md"), re.MULTILINE)
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in modules()}
    assert {name: int(number) for name, number in listed} == lines


def test_design_says_what_each_file_holds() -> None:
    listed = re.findall(r"^\| `(\w+\.py)` \|", read("DESIGN.md"), re.MULTILINE)
    assert sorted(listed) == [path.name for path in modules()]


def test_readme_lists_every_variable() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in modules())
    used = set(re.findall(r"TORCH_TPU_(?:INTERNAL|SPMD)_HANDSHAKE_[A-Z_]+", code))
    table = re.findall(r"^\| `TORCH_TPU_.*?\|", read("README.md"), re.MULTILINE)
    assert sorted(re.findall(r"TORCH_TPU_\w+", "".join(table))) == sorted(used)


def test_every_exception_and_keyword_is_told() -> None:
    handshake = load("handshake")
    for name in handshake.__all__:
        if name.endswith("Error"):
            assert f"| `{name}`" in read("MESSAGES.md"), name
    for keyword in inspect.signature(handshake.Handshake.__init__).parameters:
        if keyword != "self":
            assert re.search(rf"^\| [^|]*`{keyword}`[^|]*\|", read("README.md"), re.MULTILINE), keyword


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


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", read(document)):
        assert target.startswith("https://") or (PROJECT / target).exists(), target
