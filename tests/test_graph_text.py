# SPDX-License-Identifier: Apache-2.0
"""Reading the text of graphs. The texts in `data` were printed by torch 2.13; only the paths in them were changed."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout import TESTS, load

_graph_text = load("_graph_text")
DATA = TESTS / "data"


def only(text):
    (graph,) = _graph_text.parse(text)
    return graph


def node(graph, name):
    return next(node for node in graph.body.nodes if node.name == name)


def constants(node_):
    return [argument.text for argument in node_.arguments if argument.producer is None]


def names(body):
    return [node.name for node in body.nodes]


@pytest.fixture(scope="module")
def vocabulary():
    return only((DATA / "vocabulary" / "rank1.txt").read_text())


def test_reads_an_aot_graph(vocabulary):
    body = vocabulary.body
    assert names(body)[:4] == ["arg0_1", "arg1_1", "ge", "lt"]
    assert [node.name for node in body.inputs] == ["arg0_1", "arg1_1"]
    assert [(argument.text, argument.producer) for argument in body.nodes[-1].arguments] == [
        ("wait_tensor", len(body.nodes) - 2)
    ]
    ge = node(vocabulary, "ge")
    assert (ge.op, ge.target) == ("call", "torch.ops.aten.ge.Scalar")
    assert [(a.path, a.text, a.producer) for a in ge.arguments] == [("0", "arg0_1", 0), ("1", "18992", None)]
    assert (ge.dtype, ge.shape, ge.stride, ge.device) == ("b8", ("16",), ("1",), "meta")
    assert (ge.source.line, ge.source.function) == (14, "forward")
    assert ge.source.code == "mask = (tokens >= self.start) & (tokens < self.end)"
    assert not vocabulary.is_cut


def test_a_collective_has_its_group_and_the_users_own_line(vocabulary):
    all_reduce = node(vocabulary, "all_reduce")
    assert all_reduce.collective and not node(vocabulary, "wait_tensor").collective
    assert (all_reduce.group, node(vocabulary, "wait_tensor").group) == ("0", None)
    assert all_reduce.source.file.endswith("torch/distributed/_functional_collectives.py")
    assert all_reduce.user_source.place == "/home/user/model/vocab_parallel_embedding.py:18"
    assert all_reduce.user_source.code == 'return fc.all_reduce(output, "sum", W)'


def test_without_facts_the_users_own_line_is_the_last_one_before():
    text = (DATA / "vocabulary" / "rank1.txt").read_text().partition("# handshake:")[0]
    all_reduce = node(only(text), "all_reduce")
    assert (all_reduce.source.line, all_reduce.user_source.line) == (179, 17)
    text = text.replace("        embedding:", "        # No stacktrace found for following nodes\n        embedding:")
    assert node(only(text), "embedding").source is None


def test_facts_of_a_nested_body_are_told_from_those_of_the_graph():
    lines = [
        "class G(torch.nn.Module):", "    def forward(self, x):", "        c = self.c", "        return (c,)",
        "    class body_0(torch.nn.Module):", "        def forward(self, x):", "            c = self.c",
        "            return (c,)", "# handshake: constant c = [1]", "# handshake: constant body_0.c = [2]",
        "# handshake: mutated body_0.x = add_", "# handshake: source body_0.c = /m.py:3: c = torch.tensor([2])",
    ]  # fmt: skip
    body = only("\n".join(lines)).body
    nested = body.bodies["body_0"]
    assert [each.constant for each in (body.nodes[1], nested.nodes[1])] == ["[1]", "[2]"]
    assert [each.mutated_by for each in (body.nodes[0], nested.nodes[0])] == [None, "add_"]
    assert nested.nodes[1].user_source[:4] == ("/m.py", 3, "", "c = torch.tensor([2])")


def test_facts_that_torch_does_not_print_are_read(vocabulary):
    assert vocabulary.rank == 1
    assert vocabulary.groups == {"0": ((0, 1, 2, 3), "default_pg")}


def test_reads_dynamos_graph_with_methods_operators_and_a_nested_body():
    graph = only((DATA / "dynamo_checkpoint.txt").read_text())
    assert node(graph, "mask").target == "operator.and"
    assert node(graph, "unsqueeze").target == ".unsqueeze"
    assert node(graph, "invert").target == "operator.invert"
    assert node(graph, "wrap_body_0").op == "get_attr"
    assert node(graph, "e_3").target == "operator.getitem"
    # The signature's name of an input is not a node of its own.
    assert names(graph.body)[:4] == ["l_tok_", "l_weight_", "l_w_", "ge"]
    assert node(graph, "ge").arguments[0].producer == 0
    assert names(graph.body.bodies["wrap_body_0"]) == ["e_2", "l_w_", "matmul", "relu", "output"]
    checkpoint = node(graph, "tag_activation_checkpoint")
    assert ("use_reentrant", "False", None) in checkpoint.arguments


def test_reads_symbolic_shapes_and_two_nested_bodies():
    graph = only((DATA / "aot_dynamic_cond.txt").read_text())
    assert (node(graph, "arg0_1").dtype, node(graph, "arg0_1").shape) == ("Sym", ("s77",))
    assert node(graph, "getitem_1").shape == ("s77 - 2", "s27")
    assert node(graph, "sum_1").shape == ()
    assert list(graph.body.bodies) == ["true_graph_0", "false_graph_0"]
    assert constants(node(graph, "mul_5")) == ["inf"]
    assert ("dtype", "torch.float16", None) in node(graph, "_to_copy").arguments


def one(statement, facts=""):
    head = 'class GraphModule(torch.nn.Module):\n    def forward(self, x: "f32[2]"):\n'
    return only(f"{head}        {statement}\n        return (x,)\n{facts}\n")


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        ("f32[2, 3]", ("f32", ("2", "3"), None, "", "")),
        ("bf16[2, 3][3, 1]cuda:7", ("bf16", ("2", "3"), ("3", "1"), "cuda", "")),
        ("f8e4m3fn[][]cpu", ("f8e4m3fn", (), (), "cpu", "")),
        ("f32[Max(1, s0), s1 + 4]", ("f32", ("Max(1, s0)", "s1 + 4"), None, "", "")),
        ("Sym(Eq(s0, 4))", ("Sym", ("Eq(s0, 4)",), None, "", "")),
        ("Parameter(f32[4][1]cpu)", ("f32", ("4",), ("1",), "cpu", "Parameter")),
        ("DTensor(f32[4][1]cuda:0, S(0))", ("f32", ("4",), ("1",), "cuda", "DTensor S(0)")),
        ("something else", ("", None, None, "", "something else")),
        pytest.param("a" * 100_000, ("", None, None, "", "a" * 100_000), id="long"),
    ],
)
def test_annotations(annotation, expected):
    made = one(f'y: "{annotation}" = torch.relu(x);  x = None').body.nodes[-2]
    assert (made.dtype, made.shape, made.stride, made.device, made.note) == expected


@pytest.mark.parametrize(
    ("statement", "target", "texts"),
    [
        ("y = torch.ops.aten.view.default(x, [2, -1])", "torch.ops.aten.view.default", ["x", "2", "-1"]),
        ("y = x[(slice(None, 3, None), 0)]", "operator.getitem", ["x", "None", "3", "None", "0"]),
        ("y = x.to('cuda:3', dtype = torch.float16)", ".to", ["x", "device(type='cuda')", "torch.float16"]),
        ("y = torch.zeros(2, device = device(type='cuda', index=3))", "torch.zeros", ["2", "device(type='cuda')"]),
        ("y = x.shape", ".shape", ["x"]),
        ("x += 3;  y = x", "operator.iadd", ["x", "3"]),
        ("x[slice(0, 2, None)] = 3;  y = x;  y = None", "operator.setitem", ["x", "0", "2", "None", "3"]),
        ("y = x[0];  z = 4", "text", ["x", "[0];", "z", "= 4"]),
        ("y = 2 ** x;  x = None", "operator.pow", ["2", "x"]),
        ("y = self.linear(x)", "self.linear", ["x"]),
        ("y = f({'a': 1, 'b': x}, [])", "f", ["1", "x", "[]"]),
        # No Python: the repr of an object, with an address that differs in each process.
        ("y = f(x, <Stream at 0x7f3a12cd10>, 4)", "f", ["x", "<", "Stream", "at", "0x>", "4"]),
    ],
)
def test_statements(statement, target, texts):
    made = one(statement).body.nodes[-2]
    assert (made.name, made.target, [argument.text for argument in made.arguments]) == ("y", target, texts)
    assert {a.producer for a in made.arguments if a.text == "x"} <= {0}


def test_reads_a_signature_and_an_output_over_several_lines():
    graph = only(
        "class GraphModule(torch.nn.Module):\n    def forward(\n        self,\n"
        '        a: "f32[2]",  # PlainAOTInput(idx=0)\n        b: "f32[3]",\n    ):\n'
        "        add = a + b\n        return (\n            add,  # PlainAOTOutput(idx=0)\n            b,\n        )\n"
    )
    assert names(graph.body) == ["a", "b", "add", "output"]
    assert [argument.producer for argument in graph.body.nodes[-1].arguments] == [2, 1]
    assert not graph.is_cut


def test_colours_and_plain_code_are_read(vocabulary):
    coloured = only(
        "class GraphModule(torch.nn.Module):\n    def forward(self, x):\n        y = \x1b[31mtorch.relu\x1b[0m(x)\n"
    )
    assert node(coloured, "y").target == "torch.relu" and coloured.is_cut
    plain = only("\n\n\ndef forward(self, x):\n    y = torch.relu(x);  x = None\n    return y\n    ")
    assert names(plain.body) == ["x", "y", "output"]


@pytest.mark.parametrize(
    ("first", "others"),
    [
        ("", ""),
        ("[rank3]:W1130 03:22:11.7 101 split_compiler.py:12] ", "[rank3]:W1130 03:22:12.0 101 split_compiler.py:12] "),
        # As TORCH_LOGS=graph_code,aot_graphs writes them.
        (
            "V1130 04:01:00 8 torch/a.py:9] [0/0] [__x] /venv/fx/graph.py ",
            "V1130 04:01:00 8 torch/a.py:9] [0/0] [__x] ",
        ),
        ("WARNING:torch_tpu:", ""),
        ("[rank0]:WARNING:torch_tpu:", "[rank0]:"),
    ],
)
@pytest.mark.parametrize("with_markers", [True, False])
def test_graphs_are_found_in_logs_with_any_prefix(first, others, with_markers, vocabulary):
    text = (DATA / "vocabulary" / "rank1.txt").read_text()
    blocks = []
    for fingerprint in ("a" * 32, "b" * 32):
        lines = text.splitlines()
        if with_markers:
            begin = f"--- [BEGIN GRAPH MODULE: {fingerprint}] ---"
            lines = ["Handshake failed:", begin, *lines, f"--- [END GRAPH MODULE: {fingerprint}] ---"]
        blocks += [first + lines[0], *(others + line for line in lines[1:])]
        blocks += [f"{first}step 12 took 3 s"]
    graphs = _graph_text.parse("\n".join(blocks))
    assert [graph.fingerprint for graph in graphs] == (["a" * 32, "b" * 32] if with_markers else ["", ""])
    assert all(graph.body == vocabulary.body and graph.groups == vocabulary.groups for graph in graphs)


def test_every_graph_between_a_pair_of_markers_is_read(vocabulary):
    text = (DATA / "vocabulary" / "rank1.txt").read_text()
    graphs = _graph_text.parse(f"--- [BEGIN GRAPH MODULE: f] ---\n{text}{text}--- [END GRAPH MODULE: f] ---")
    assert [graph.body for graph in graphs] == [vocabulary.body] * 2
    assert [graph.first_line for graph in graphs] == [2, 2 + text.count("\n")]
    assert [graph.is_cut for graph in graphs] == [False, False]


def test_lines_of_other_threads_between_the_marks_are_no_part_of_the_graph(vocabulary):
    lines = (DATA / "vocabulary" / "rank1.txt").read_text().splitlines()
    marked = ["--- [BEGIN GRAPH MODULE: f] ---", *lines[:9], "step 3: loss 2.5", *lines[9:], "epoch = 3"]
    graph = only("\n".join([*marked, "--- [END GRAPH MODULE: f] ---"]))
    assert graph.body == vocabulary.body and not graph.is_cut


def test_records_are_read_too_also_in_a_log():
    body = {"name": "G", "nodes": [{"name": "output", "op": "output", "target": "output", "line": "return ()"}]}
    record = {"handshake_graph": 1, "rank": 3, "body": body}
    two = "\n".join(json.dumps(each) for each in (record, record | {"fingerprint": "b" * 32}))
    graphs = _graph_text.parse(two)
    assert [(graph.rank, graph.fingerprint, graph.first_line) for graph in graphs] == [(3, "", 1), (3, "b" * 32, 2)]
    assert names(graphs[0].body) == ["output"]
    logged = only(f"I1 ] --- [BEGIN GRAPH MODULE: {'a' * 32}] ---\nI1 ] {json.dumps(record)}\nI1 ] done")
    assert (logged.body, logged.fingerprint) == (graphs[0].body, "a" * 32)
    with pytest.raises(ValueError, match="not a valid graph record"):
        _graph_text.parse(json.dumps(record)[:-9])


def test_what_is_a_collective_is_what_fingerprints_take_for_one():
    def found(statement):
        made = one(statement).body.nodes[-2]
        return made.collective, made.group

    graph = load("_graph")
    assert found("y = torch.ops._c10d_functional.all_reduce.default(x, 'sum', group_name = 'tp')") == (True, "tp")
    wrapped = "torch.ops.higher_order.with_effects(x, torch.ops._c10d_functional.all_reduce.default, x, 'sum', '3')"
    assert found(f"y = {wrapped}") == (True, "3")
    assert found("y = torch.ops._c10d_functional.wait_tensor.default(x)") == (False, None)
    assert found("y = torch.ops.aten.add.Tensor(x, 1)") == (False, None)
    assert found("y = torch.ops.graph_text_test.ring.default(x, '5')") == (False, None)
    graph.register_collective("graph_text_test::ring", "group")
    assert found("z = torch.ops.graph_text_test.ring.default(x, '5')") == (True, "5")


def test_a_printed_graph_says_what_its_record_says():
    """So that reports are the same whichever of them the ranks have."""
    torch = pytest.importorskip("torch")
    import graph_workers as workers

    def program(x, tokens, scale):
        mask = (tokens >= 18992) & (tokens < 37984)
        y = x.masked_fill(~mask.unsqueeze(-1), 0.0)
        y = workers.checkpoint(lambda t: torch.relu(t @ t.t()), y, use_reentrant=False)
        y = workers.funcol.all_reduce(y, "sum", workers.dist.group.WORLD) + torch.tensor([1.0, 2.0, 3.0, 4.0])
        x[0:2] = 3
        scale.mul_(2)
        return y.sum(dim=(0, 1), keepdim=True).to(torch.float16), x[..., None, 1:], torch.zeros(3, device="cpu:0")

    def said(body):
        """All but the lines themselves, and where they come from, of which the text says less."""
        unsaid = {"line": "", "source": None, "user_source": None, "module": "", "origin": ""}
        nodes = [node._replace(**unsaid) for node in body.nodes]
        sources = [node.user_source.place.split(" in ")[0] for node in body.nodes if node.collective]
        return nodes, sources, {name: said(nested) for name, nested in body.bodies.items()}

    with workers.world():
        inputs = torch.ones(4, 4), torch.arange(4), torch.ones(3)
        graphs = workers.compiled(program, *inputs, dynamic=True).all
        pairs = [(load("_graph").graph_text(graph), load("_graph").graph_record(graph)) for graph in graphs]
    assert len(pairs) == 2
    for text, record in pairs:
        printed, recorded = only(text), only(record)
        assert said(printed.body) == said(recorded.body)
        assert (printed.rank, dict(printed.groups)) == (recorded.rank, dict(recorded.groups))
        assert recorded.groups and sum(node.collective for node in recorded.body.nodes) == 1
        assert any(node.mutated_by for node in recorded.body.nodes)


def test_defaults_and_variadic_inputs_are_inputs():
    graph = only("def forward(self, x, k = 3, *args, **kw):\n    add = x + k\n    return add\n")
    assert names(graph.body) == ["x", "k", "args", "kw", "add", "output"]
    assert constants(node(graph, "k")) == ["3"]


@pytest.mark.parametrize(
    ("fact", "ranks"),
    [
        ("ranks 0-2, 7; size 4", (0, 1, 2, 7)),
        ("rank 3; size 1; description mesh_tp", (3,)),
        ("ranks 0-1 and 2 more", None),
        (f"ranks 0-{10**8}; size 2", None),
        (f"ranks 0-{'9' * 5000}", None),
        ("ranks 1-2-3", None),
        ("ranks 0, , 3", None),
    ],
)
def test_ranks_of_a_group(fact, ranks):
    groups = one("y = x + 1", facts=f"# handshake: group mesh 5 = {fact}").groups
    assert groups == ({} if ranks is None else {"mesh 5": (ranks, fact.partition("description ")[2])})


def test_bodies_nested_without_end_are_refused():
    lines = []
    for depth in range(1000):
        lines += [" " * depth + f"class b{depth}(torch.nn.Module):", " " * depth + " def forward(self, x):"]
    with pytest.raises(ValueError, match="MAX_NESTED_BODIES"):
        _graph_text.parse("\n".join(lines))


def test_a_text_that_is_cut_off_is_said_to_be():
    text = (DATA / "vocabulary" / "rank1.txt").read_text()
    assert only(text[: text.index("embedding:")]).is_cut
    assert only("--- [BEGIN GRAPH MODULE: f] ---\n" + text).is_cut


@pytest.mark.parametrize("text", ["", "hello\nworld", "\0\1\2", "class A:\n    def f(self): pass\n", "class \n" * 50])
def test_what_is_no_graph_gives_none(text):
    assert _graph_text.parse(text) == []


SAMPLES = [(DATA / name).read_text() for name in ("aot_dynamic_cond.txt", "dynamo_checkpoint.txt")]
PIECES = st.one_of(
    st.text(max_size=20), st.sampled_from([*"()[]{}'\"\\;:=,#.\n", "\n    ", "class x(torch.nn.Module):", "None"])
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SAMPLES), st.lists(st.tuples(st.integers(0, 2900), st.integers(0, 300), PIECES), max_size=8))
def test_whatever_stands_in_a_text_is_read(text, edits):
    for start, length, piece in edits:
        text = text[:start] + piece + text[start + length :]
    for graph in _graph_text.parse(text):
        bodies = [graph.body]
        for body in bodies:
            bodies += body.bodies.values()
            for position, made in enumerate(body.nodes):
                assert all(a.producer is None or 0 <= a.producer < position for a in made.arguments)


def test_inputs_that_share_memory_are_told_as_the_fingerprint_tells_them():
    torch = pytest.importorskip("torch")
    import graph_workers as workers

    graph, whole = load("_graph"), torch.ones(6)
    inputs = [(whole[:3], whole[3:]), (torch.ones(3), torch.ones(3))]
    graphs = [workers.compiled(lambda x, y: x + y, *of_rank).forward[0] for of_rank in inputs]
    assert len({graph.graph_fingerprint(each) for each in graphs}) == 2
    for make in (graph.graph_text, graph.graph_record):
        shared, apart = (only(make(each)) for each in graphs)
        assert [node.shares for node in shared.body.nodes[:3]] == [None, "arg0_1", None]
        (found,) = load("_graph_diff").compare(apart, shared, {}).differences
        assert (found.kind, found.what) == ("inputs", "memory")
        assert [*found.sides] == ["of its own", "shares that of `arg0_1`"]
