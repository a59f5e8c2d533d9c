# SPDX-License-Identifier: Apache-2.0
"""Graphs as torch prints them, for tests of what is said about them; and what every page has to keep to."""

import re
from html.parser import HTMLParser

from layout import TESTS

VOCABULARY = [(TESTS / "data" / "vocabulary" / f"rank{rank}.txt").read_text() for rank in range(4)]


def without_rank(text):
    return re.sub(r'# handshake: rank = \d+\n|"rank":\d+,', "", text)


def small(body, facts="", inputs='x: "f32[2]"'):
    lines = [f"    def forward(self, {inputs}):", *(f"        {line}" for line in body.split("\n"))]
    return "\n".join(["class G(torch.nn.Module):", *lines, facts, ""])


def big_text(layers, rank=0, extra_layer=None):
    """A graph of `layers` times 18 nodes, in the form in which torch prints it."""
    weights = ", ".join(f'w{number}: "bf16[4096, 1024][1024, 1]cuda:{rank}"' for number in range(4 * layers))
    lines = [
        "class <lambda>(torch.nn.Module):",
        f'    def forward(self, x: "bf16[8, 4096][4096, 1]cuda:{rank}", {weights}):',
    ]
    last = "x"

    def add(operation, arguments, line):
        nonlocal last
        name = f"n{len(lines)}"
        lines.append(f"        # File: /home/user/model/layers.py:{line} in forward, code: x = step_{line}(x)")
        lines.append(f'        {name}: "bf16[8, 4096][4096, 1]cuda:{rank}" = torch.ops.{operation}({last}{arguments})')
        last = name

    add("aten.ge.Scalar", f", {18992 * rank}", 3)
    for layer in range(layers):
        for k in range(4):
            add("aten.mm.default", f", w{4 * layer + k}", 10 + k)
            add("aten.mul.Tensor", ", 0.5", 20 + k)
            add("aten.relu.default", "", 30 + k)
        if layer == extra_layer:
            add("aten.clamp.default", ", -1, 1", 99)
        add("_c10d_functional.all_reduce.default", ", 'sum', '0'", 40)
        add("_c10d_functional.wait_tensor.default", "", 40)
    return "\n".join([*lines, f"        return ({last},)", ""])


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.open, self.attributes = set(), [], []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes
        if tag not in ("meta", "br", "hr", "col"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def assert_page_is_self_contained(page):
    parsed = _Page()
    parsed.feed(page)
    assert parsed.open == []
    assert not parsed.tags & {"script", "link", "img", "iframe", "object", "svg"}
    assert all(name in ("lang", "charset", "name", "content", "class", "colspan", "id") or (
        name == "href" and value.startswith("#")
    ) for name, value in parsed.attributes), parsed.attributes  # fmt: skip
    assert "http" not in page and "url(" not in page and "@import" not in page
    assert "prefers-color-scheme: dark" in page
