# SPDX-License-Identifier: Apache-2.0
"""One rank of a torch.distributed job of two, which finds its coordinator through the job's store.

Arguments: rank, the store ("tcp" or "file"), where it is, and the coordinator's rank. Prints what it found as JSON.
"""

import json
import sys
import time

import torch.distributed as dist
from layout import load

_vocabulary = load("_vocabulary")
handshake = load("handshake")


def main(rank, kind, place, coordinator_rank):
    if kind == "tcp":
        store = dist.TCPStore("127.0.0.1", int(place), 2, is_master=rank == 0)
    else:
        store = dist.FileStore(place, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = {}
    group = _vocabulary.ProcessGroupId((0, 1))

    def vote(h, before):
        counts = {group: _vocabulary.ProcessGroupCollectiveCount(before, 1)}
        return h.submit(
            _vocabulary.CollectiveHandshakeRequest(_vocabulary.RankCollectiveCounts(counts), "same", h.rank)
        )

    with handshake.Handshake(coordinator_rank=coordinator_rank) as h:
        found["who"] = [h.rank, h.world_size]
        found["fat"] = [vote(h, before) for before in range(200)]
        store.set(f"ready {rank}", "yes")
        found["address"] = h.address
        # Both jobs vote at the same time until the test has knocked at both doors.
        print(json.dumps(h.address), flush=True)
        sys.stdin.readline()
        found["fat"] += [vote(h, before) for before in range(200, 400)]
        store.wait(["ready 0", "ready 1"])
    # Nobody has made this one's coordinator.
    started = time.monotonic()
    if rank == coordinator_rank:
        try:
            vote(handshake.Handshake(coordinator_rank=1 - coordinator_rank, timeout_s=0.3), 0)
        except _vocabulary.HandshakePeerLostError as error:
            found["alone"] = str(error)
            found["seconds"] = time.monotonic() - started
        store.set("looked", "yes")
    else:
        store.wait(["looked"])
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
