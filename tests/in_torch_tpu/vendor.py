# SPDX-License-Identifier: Apache-2.0
"""What VENDORING.md says, done to a copy of torch_tpu 0.2.0.

    python vendor.py SITE FOLDER              # SITE/torch_tpu copied to FOLDER, with this project's files in it
    python vendor.py SITE FOLDER --changes    # … and the recommended changes to torch_tpu made in the copy

A change finds its places by what they contain, not by line numbers. Where one is not found, torch_tpu is another than
the changes are for, and none is made.
"""

import argparse
import ast
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
DISTRIBUTED = Path("torch_tpu", "_internal", "distributed")
OWN = "collective_handshake"  # the folder of the project's files
SPLIT_COMPILER = Path("torch_tpu", "_internal", "compile", "split_compiler.py")


class PlaceNotFoundError(Exception):
    """What a change is about is not there, or not once."""


def vendor(site: Path, folder: Path, project: Path = PROJECT) -> Path:
    """A copy of SITE/torch_tpu in `folder`, with the project's files in a folder of their own, and one line that leads
    there in the place of its handshake. Big files are not copied but linked. Returns `folder`."""
    shutil.copytree(site / "torch_tpu", folder / "torch_tpu", copy_function=_link_or_copy)
    target = folder / DISTRIBUTED / OWN
    target.mkdir()
    target.joinpath("__init__.py").touch()
    old = folder / DISTRIBUTED / "handshake.py"
    old.unlink()
    old.write_text(f"from {'.'.join(DISTRIBUTED.parts)}.{OWN}.handshake import *\n")
    for module in [*project.glob("_*.py"), project / "handshake.py"]:
        shutil.copy(module, target)
    return folder


def change(folder: Path) -> None:
    """Makes VENDORING's changes in the copy in `folder`. Raises PlaceNotFoundError."""
    file = folder / SPLIT_COMPILER
    text = changed(file.read_text())
    file.unlink()  # a link to the file of the installation
    file.write_text(text)


def changed(text: str, numbers: Sequence[int] = ()) -> str:
    """The text of split_compiler.py after the changes of these numbers, by default all. Raises PlaceNotFoundError."""
    for number, edit in CHANGES.items():
        if number in (numbers or CHANGES):
            try:
                text = edit(text)
            except PlaceNotFoundError as error:
                raise PlaceNotFoundError(f"change {number}: {SPLIT_COMPILER.name} has no {error}") from error
    return text


# ---------------------------------------------------------------------- the changes, by their numbers in VENDORING.md


def count_in_one_place(text: str) -> str:
    for name in ("_RANK_COLLECTIVE_COUNTS", "_RANK_COLLECTIVE_COUNTS_LOCK", "_submit_handshake"):
        text = put(text, name, "")
    return replace(text, "_submit_handshake(", "handshake.submit_handshake(")


def count_nested_graphs(text: str) -> str:
    text = import_graph(text)
    return replace(text, "process_group_utils.get_num_collectives_per_pg(", "_graph.count_collectives(")


def fingerprint_all_that_matters(text: str) -> str:
    text = import_graph(text)
    return replace(text, "tpu_torch_compile.fingerprint64(graph_module.code)", "_graph.graph_fingerprint(graph_module)")


def record_only_for_a_report(text: str) -> str:
    return replace(with_copy_of_graph(import_graph(text)), "graph_module.print_readable(print_output=False)", RECORD)


def gate(text: str) -> str:
    text = with_copy_of_graph(import_graph(text))
    text = put(text, "_SplitCompiledExecutable._maybe_handshake_and_recompile", EXECUTABLE_SPLIT)
    text = put(text, "_SplitCompiledExecutable.__call__", EXECUTABLE_CALL)
    text = put(text, "_SplitCompiledExecutable.__reduce__", EXECUTABLE_REDUCE)
    return put(text, "SplitCompiler.__call__", COMPILER_CALL)


def start_on_every_rank(text: str) -> str:
    return replace(text, "self.base_compiler = base_compiler", f"self.base_compiler = base_compiler{COMPILER_START}")


# The graph is about to be changed in place, and the record is made later, if at all.
RECORD = "functools.partial(_graph.graph_record, _copy_of_graph(graph_module))"
COPY_OF_GRAPH = '''
def _copy_of_graph(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
  """A copy that later passes over the graph leave alone."""
  with unset_fake_temporarily():
    return torch.fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
'''
EXECUTABLE_SPLIT = '''
  gate: handshake.DispatchGate | None = None
  _split_executable: "_SplitCompiledExecutable | None" = None
  _compiles_split = threading.Lock()

  def _split(self) -> "_SplitCompiledExecutable":
    """This graph split at its collectives, compiled when that is first needed."""
    with self._compiles_split:
      if self._split_executable is None:
        try:
          self._split_executable = self.recompile_fn()
          self._split_executable.resolve()
        except BaseException as error:
          self.gate.abandon(f"{type(error).__name__}: {error}")
          raise
      return self._split_executable
'''
EXECUTABLE_CALL = '''
  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    if self.gate is not None:
      self.resolve()  # it may still be compiling
      if not self.gate.vote():
        return self._split()(*args, **kwargs)
    if len(args) == 1 and isinstance(args[0], (list, tuple)):
      args = args[0]
    return self._split_gm(*args)
'''
EXECUTABLE_REDUCE = '''
  def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if self.pg_to_num_collectives:
      # A rank that loads it would not vote, and the others would wait.
      raise NotImplementedError("a graph that ranks vote on is not cached")
    self.resolve()
    return _unpickle_split_compiled_executable, (self._split_gm,)
'''
COMPILER_CALL = '''
  def __call__(
      self,
      graph_module: torch.fx.GraphModule,
      example_inputs: Sequence[InputType],
      is_fwd: bool = True,
      module_name: str | None = None,
  ) -> _SplitCompiledExecutable:
    """Compiles the graph whole where ranks will vote on it, else split."""
    compile_graph = functools.partial(
        self._compile_graph, graph_module, example_inputs, is_fwd, module_name=module_name
    )
    stage = tpu_torch_compile.get_handshake_stage_env_var_once()
    split = env.get_bool_env_once("TORCH_TPU_INTERNAL_MATERIALIZE_COLLECTIVE_TENSORS", default_value=True)
    gate, collectives = None, {}
    if split and stage != tpu_torch_compile.HandshakeStage.OFF:
      voted_on = _copy_of_graph(graph_module)
      collectives = _graph.count_collectives(voted_on)
      if handshake.should_handshake(collectives):
        record = functools.partial(_graph.graph_record, voted_on)
        gate = handshake.DispatchGate(_graph.graph_fingerprint(voted_on), collectives, record, stage=stage)
        split = False
    executable = compile_graph(materialize_collectives=split)
    executable.pg_to_num_collectives = collectives
    if gate is not None:
      executable.gate = gate
      executable.recompile_fn = functools.partial(compile_graph, materialize_collectives=True)
    return executable
'''
COMPILER_START = """
    if (
        dist.is_initialized()
        and tpu_torch_compile.get_handshake_stage_env_var_once() != tpu_torch_compile.HandshakeStage.OFF
    ):
      handshake.Handshake()"""

CHANGES: dict[int, Callable[[str], str]] = {
    1: count_in_one_place,
    2: count_nested_graphs,
    3: fingerprint_all_that_matters,
    4: record_only_for_a_report,
    5: gate,
    6: start_on_every_rank,
}

# ---------------------------------------------------------------------- how a place is found


def replace(text: str, old: str, new: str) -> str:
    if old not in text:
        raise PlaceNotFoundError(repr(old))
    return text.replace(old, new)


def put(text: str, name: str, new: str, keep: bool = False) -> str:
    """`new` in the place of the function, method (CLASS.METHOD) or variable of this name; with `keep`, ahead of it."""
    body: list[ast.stmt] = ast.parse(text).body
    found: ast.stmt | None = None
    for part in name.split("."):
        matching = [statement for statement in body if _name(statement) == part]
        if len(matching) != 1:
            raise PlaceNotFoundError(name)
        found = matching[0]
        body = getattr(found, "body", [])
    assert found is not None and found.end_lineno is not None
    lines = text.splitlines(keepends=True)
    end = found.lineno - 1 if keep else found.end_lineno
    return "".join([*lines[: found.lineno - 1], new.lstrip("\n"), "\n\n" if keep else "", *lines[end:]])


def _name(statement: ast.stmt) -> str:
    if isinstance(statement, ast.AnnAssign | ast.Assign):
        target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
        return target.id if isinstance(target, ast.Name) else ""
    return str(getattr(statement, "name", ""))


def import_graph(text: str) -> str:
    """`_graph` is imported, once, beside the handshake."""
    line = "from torch_tpu._internal.distributed import handshake\n"
    if "import _graph\n" in text:
        return text
    return replace(text, line, f"{line}from torch_tpu._internal.distributed.{OWN} import _graph\n")


def with_copy_of_graph(text: str) -> str:
    """The function that makes one is there, once, ahead of those that use it."""
    if "def _copy_of_graph(" in text:
        return text
    return put(text, "_unpickle_split_compiled_executable", COPY_OF_GRAPH, keep=True)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--changes", action="store_true")
    given = parser.parse_args()
    vendor(given.site, given.folder)
    if given.changes:
        change(given.folder)


if __name__ == "__main__":
    main()
