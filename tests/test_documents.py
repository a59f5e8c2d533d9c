# SPDX-License-Identifier: Apache-2.0
"""The documents keep up with the code: files, settings, exceptions and keywords that they list are those that exist."""

import inspect
import re
from pathlib import Path

import pytest
from layout import PACKAGE, PROJECT, load

pytestmark = [pytest.mark.flat_only, pytest.mark.skipif(bool(PACKAGE), reason="reads the checkout's own files")]

DOCUMENTS = ("README.md", "VENDORING.md", "CHANGELOG.md")


def read(name: str) -> str:
    return (PROJECT / name).read_text(encoding="utf-8")


def modules() -> list[Path]:
    return sorted(path for path in PROJECT.glob("*.py") if path.name != "bench.py")


def test_vendoring_lists_the_files_to_copy() -> None:
    listed = re.findall(r"^ {4}(\w+\.py)$", read("VENDORING.md"), re.MULTILINE)
    assert listed == [path.name for path in modules()]


def test_readme_says_what_each_file_holds() -> None:
    table = read("README.md").partition("| file | holds |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+\.py)`", table)) == [path.name for path in modules()]


def test_readme_lists_every_variable() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in modules())
    used = set(re.findall(r"TORCH_TPU_INTERNAL_HANDSHAKE_[A-Z_]+", code))
    assert used
    table = re.findall(r"^\| `(TORCH_TPU_INTERNAL_HANDSHAKE_[A-Z_]+)` \|", read("README.md"), re.MULTILINE)
    assert sorted(table) == sorted(used)


def test_readme_lists_every_exception_and_keyword() -> None:
    handshake = load("handshake")
    readme = read("README.md")
    for name in handshake.__all__:
        if name.endswith("Error"):
            assert f"| `{name}`" in readme, name
    for keyword in inspect.signature(handshake.Handshake.__init__).parameters:
        if keyword != "self":
            assert re.search(rf"^\| [^|]*`{keyword}`[^|]*\|", readme, re.MULTILINE), keyword


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", read(document)):
        assert target.startswith("https://") or (PROJECT / target).exists(), target
