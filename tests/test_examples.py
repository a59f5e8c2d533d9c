# SPDX-License-Identifier: Apache-2.0
"""The examples, run as the README says to run them: what they print is what they are there to show."""

import importlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from layout import PACKAGE, PROJECT, child_environment, load

pytestmark = [pytest.mark.flat_only, pytest.mark.skipif(bool(PACKAGE), reason="runs the checkout's own examples")]

# Of the processes that one example starts; they import torch and compile for most of it.
EXAMPLE_TIMEOUT_S = 100
# Torchrun ends its ranks when it is asked to end itself.
END_WITHIN_S = 15


def run_example(ranks: int, script: str, *arguments: str, cwd: Path) -> str:
    """What the example prints. It finds its modules by itself: nothing is on its path, and it is started elsewhere."""
    # Standalone: torchrun takes a free port.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    process = subprocess.Popen(
        [*torchrun, str(PROJECT / "examples" / script), *arguments],
        cwd=cwd,
        env=child_environment(PYTHONPATH="", OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=EXAMPLE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=END_WITHIN_S)
        pytest.fail(f"{script} has not ended within {EXAMPLE_TIMEOUT_S} s:\n{stdout}\n{stderr}")
    finally:
        process.kill()
    assert process.returncode == 0, f"{stdout}\n{stderr}"
    assert "Traceback" not in stderr
    return stdout


def test_vocab_parallel_tells_its_story(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    printed = run_example(4, "vocab_parallel.py", "--debug", str(reports), cwd=tmp_path)
    opening, *steps = printed.split("\n\n")
    assert opening.startswith("4 ranks")
    assert [step[:2] for step in steps] == ["1.", "2.", "3.", "4."], "one rank tells it, and the report stays in step 2"
    split, report, plan, mend = steps

    assert "fingerprints differ at [0, 17) on ranks 0-3" in split
    assert "forward : 35 segments: 17 with one collective each, 18 without" in split
    for said in ("ranks 0-3 have 4 different graphs", "= 18992 · rank", "vocab_parallel.py:", "in a buffer"):
        assert said in report
    (page,) = reports.glob("*.html")
    assert str(page) in report
    assert "18992 · rank" in page.read_text(encoding="utf-8")
    assert "forward : 2 segments: 17 of 17 collectives in 1 fat, 1 without" in plan
    assert "backward: 1 segment: 16 of 16 collectives in 1 fat" in plan
    assert "forward : 1 segment: 17 of 17 collectives in 1 fat" in mend
    assert "backward: 1 segment: 16 of 16 collectives in 1 fat" in mend
    for step in (plan, mend):
        assert "the output and all 33 gradients are bitwise equal to step 1's, on every rank" in step


def test_llama_keeps_all_its_collectives_fat(tmp_path: Path) -> None:
    pytest.importorskip("transformers", "5.24")  # the first whose way to divide a model was tried
    printed = run_example(4, "llama.py", cwd=tmp_path)
    _, split, plan = printed.split("\n\n")
    assert "forward : 21 segments: 10 with one collective each, 11 without" in split
    assert "backward: 43 segments: 21 with one collective each, 22 without" in split
    assert "forward : 2 segments: 10 of 10 collectives in 1 fat, 1 without" in plan
    assert "backward: 2 segments: 21 of 21 collectives in 1 fat, 1 without" in plan
    assert "the output and all 39 gradients are bitwise equal to step 1's, on every rank" in plan


def test_train_prints_a_row_for_each_stage(tmp_path: Path) -> None:
    steps = 3
    printed = run_example(2, "train.py", "--steps", str(steps), "--diverge-rank", "1", cwd=tmp_path)
    rows = [line.split() for line in printed.splitlines() if "STAGE" in line or line.startswith("OFF")]
    stages, losses = [row[0] for row in rows], {row[-1] for row in rows}
    assert stages == ["OFF", "COMPILE_STAGE", "DISPATCH_STAGE"]
    assert len(losses) == 1, "the handshake changes how graphs are cut, not what they compute"
    dispatches = 2 * (steps + 2)  # forward and backward, warm-up included
    handshakes_fat_split = [tuple(map(int, row[2:5])) for row in rows]
    assert handshakes_fat_split == [(0, 0, 0), (2, 0, 2), (dispatches, 0, dispatches)]
    assert {row[5] for row in rows} == {"9+7"}


def test_backend_takes_a_stage_as_the_handshake_does(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(PROJECT / "examples"))
    make_backend = importlib.import_module("handshake_backend").make_backend
    handshake = load("handshake")
    assert make_backend(stage=" dispatch_stage").stage is handshake.HandshakeStage.DISPATCH_STAGE
    assert make_backend(stage=handshake.HandshakeStage.OFF).stage is handshake.HandshakeStage.OFF
    monkeypatch.setenv("TORCH_TPU_INTERNAL_HANDSHAKE_STAGE", "COMPILE_STAGE")
    assert make_backend().stage is handshake.HandshakeStage.COMPILE_STAGE
    for wrong, complaint in (
        ({"stage": "SOMETIMES"}, "stage='SOMETIMES' is not a valid stage; use one of OFF, COMPILE_STAGE"),
        ({"stage": 5}, "stage=5 is not a valid stage"),
        ({"inner": "llvm"}, "inner='llvm' is not a compiler; use one of eager, inductor"),
    ):
        with pytest.raises(handshake.HandshakeConfigError) as error:
            make_backend(**wrong)
        assert complaint in str(error.value)


@pytest.fixture
def backend_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's backend, and process groups of rank 0 alone and of ranks 0-1, in which nothing is communicated."""
    pytest.importorskip("torch")
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.syspath_prepend(str(PROJECT / "examples"))
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield importlib.import_module("handshake_backend")
    dist.destroy_process_group()


@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize("is_fat", [True, False])
@pytest.mark.parametrize("as_eager", [True, False])
def test_inductor_compiles_random_ops(backend_module: Any, is_fat: bool, as_eager: bool) -> None:
    import torch
    import torch.distributed as dist

    functional = torch.ops._c10d_functional
    group_name = dist.new_group([0]).group_name if is_fat else dist.group.WORLD.group_name

    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return functional.wait_tensor(functional.all_reduce(x, "sum", group_name))

        backward = forward

    def function(x: torch.Tensor) -> torch.Tensor:
        x = Reduced.apply(torch.nn.functional.dropout(x, 0.5))
        return Reduced.apply(torch.cond(x.sum() > 0, torch.rand_like, torch.randn_like, (x.detach(),)) * x)

    class Inductor(backend_module.Inductor):
        def compile(self, graph_module: Any, fake_mode: Any) -> Any:
            before = graph_text(graph_module)
            compiled = super().compile(graph_module, fake_mode)
            assert graph_text(graph_module) == before, "the graph that is voted on is left as it was"
            return compiled

    def run(function: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.ones(64, requires_grad=True)
        torch.manual_seed(0)
        value = function(x)
        value.sum().backward()
        assert x.grad is not None
        return value.detach(), x.grad

    graph_text = load("_graph").graph_text
    torch._dynamo.reset()
    backend = backend_module.Backend(Inductor(), load("handshake").HandshakeStage.OFF, False, "exact")
    with torch._inductor.config.patch(fallback_random=as_eager):
        value, gradient = run(torch.compile(function, backend=backend))
    assert backend.report()["segments"] == ([1, 1] if is_fat else [4, 4])
    # Of a linear function of x, where x is 1. Half of the values are dropped.
    assert torch.equal(value, gradient) and 16 < value.count_nonzero() < 48
    if as_eager:
        for ours, eager in zip((value, gradient), run(function), strict=True):
            torch.testing.assert_close(ours, eager)


def test_an_example_that_torchrun_did_not_start_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(PROJECT / "examples" / "vocab_parallel.py")]
    ran = subprocess.run(
        command, cwd=tmp_path, env=child_environment(), capture_output=True, text=True, timeout=EXAMPLE_TIMEOUT_S
    )
    assert ran.returncode == 2
    assert "torchrun --nproc-per-node 4 examples/vocab_parallel.py" in ran.stderr
