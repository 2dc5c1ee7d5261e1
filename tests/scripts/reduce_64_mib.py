"""Say how large /dev/shm is, then sum 64 MiB over two workers in shared memory."""

import shutil

import torch

import tutti


def work() -> float:
    world = tutti.init(transport="shared_memory")
    shared = world.transport.empty(16 * 2**20, torch.float32)
    shared.fill_(world.rank + 1.0)
    world.transport.all_reduce(shared).wait()
    assert shared.eq(3.0).all()
    return shared[-1].item()


if __name__ == "__main__":
    print(f"/dev/shm has {shutil.disk_usage('/dev/shm').total // 2**20} MiB", flush=True)
    print("sums", tutti.launch(work, workers=2))
