# SPDX-License-Identifier: Apache-2.0
"""A model that nobody here wrote: transformers' Llama, divided over the ranks by its own tensor-parallel plan.

    torchrun --nproc-per-node 4 examples/llama.py [--inner inductor]

Its plan divides the embedding by vocabulary, and each rank's bounds are constants in its graph: no two ranks have the
same. The weights are random, and nothing is downloaded. Each rank is a process on this machine's CPU, with gloo.
"""

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

# The modules of the handshake lie one folder above this one.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from handshake_backend import Backend, Inductor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from vocab_parallel import NotesCollectives, Run, tell, tell_equal, tell_run

from handshake import HandshakeStage

LAYERS, TOKENS = 4, 16


def build() -> Any:
    """A small Llama, this rank's part of it. All ranks draw the same whole weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    plan, _, mesh = LlamaForCausalLM.prepare_distribute_model(DistributedConfig(tp_size=dist.get_world_size()))
    return LlamaForCausalLM.maybe_distribute_model(LlamaForCausalLM(config), plan, mesh)


class NotesInInductor(NotesCollectives, Inductor):
    """Compiles each segment by Inductor, and notes the same."""


def run(inner: NotesCollectives, partial: bool) -> Run:
    """One pass through the model, from the same weights every time, compiled anew."""
    torch._dynamo.reset()
    model = build()
    tokens = torch.randint(model.config.vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(1))

    backend = Backend(inner, HandshakeStage.COMPILE_STAGE, partial, "exact")
    compiled: Any = torch.compile(model, backend=backend)
    output = compiled(tokens, labels=tokens)
    num_forward = len(inner.collectives_of_segments)
    output.loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    own = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    segments = inner.collectives_of_segments
    return Run(segments[:num_forward], segments[num_forward:], [output.logits.detach(), *own])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inner", choices=("eager", "inductor"), default="eager", help="what compiles a segment")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it under torchrun: torchrun --nproc-per-node 4 examples/llama.py")
    inner = NotesInInductor if arguments.inner == "inductor" else NotesCollectives

    dist.init_process_group("gloo")
    if dist.get_world_size() not in (2, 4):
        parser.error("its 4 heads of keys and values go to 2 or 4 ranks: --nproc-per-node 4")
    logging.getLogger("torch_tpu.handshake").setLevel(logging.ERROR)  # each rank logs that it was split
    tell(f"transformers' Llama with {LAYERS} layers, on {dist.get_world_size()} ranks.\n")

    tell("1. The bounds of the vocabulary differ, so all ranks run split at each collective.")
    skinny = run(inner(), partial=False)
    tell_run(skinny)

    tell("\n2. With partial=True the ranks keep fat what their graphs have in common.")
    planned = run(inner(), partial=True)
    tell_run(planned)
    tell_equal(planned, skinny)
    dist.barrier()  # nobody's last collective is torn down under another rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
