"""Every kernel once under compute-sanitizer, by memcheck and by racecheck: `make sanitize`.

`python tests/sanitize.py racecheck` runs one of its tools alone.
Exits 1 when a tool finds something, and says what to install where there is none.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import torch

from deltalog_kernels import GDN, KDA, RWKV6, LogLayout, SlotMemory, fold_and_fill, gdn_gates, gdn_step, merge
from deltalog_kernels.bench.steps import deltalog_step, inputs

TOOLS = ("memcheck", "racecheck")
# Small, for the tools are slow; head ratios 1 to 3; each size of a tile's row.
LAYOUTS = (
    LogLayout(GDN, 1, 3, 128, 128, 4),
    LogLayout(GDN, 2, 2, 64, 32, 3, state_dtype=torch.bfloat16, update_dtype=torch.bfloat16),
    LogLayout(GDN, 2, 4, 16, 16, 2, state_dtype=torch.float16),
    LogLayout(KDA, 2, 2, 128, 64, 4),
    LogLayout(KDA, 1, 2, 256, 16, 2, state_dtype=torch.bfloat16),
    LogLayout(RWKV6, 2, 2, 64, 64, 4),
    LogLayout(RWKV6, 1, 1, 128, 128, 2, state_dtype=torch.bfloat16),
)


def main() -> None:
    if "--launch" in sys.argv:
        launch_every_kernel("cuda")
        torch.cuda.synchronize()
        return
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        sys.exit(
            "expected compute-sanitizer on the PATH, found none; install the CUDA toolkit or NVIDIA's "
            "package cuda-sanitizer, and put the folder with compute-sanitizer on the PATH"
        )
    # An allocation of its own for each tensor: what reaches beyond one is then out of bounds.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    failed = []
    for tool in sys.argv[1:] or TOOLS:
        print(f"compute-sanitizer --tool {tool}: {len(LAYOUTS)} layouts ...", flush=True)
        command = [sanitizer, "--tool", tool, "--error-exitcode", "1", sys.executable, __file__, "--launch"]
        if subprocess.run(command, env=environment).returncode:
            failed.append(tool)
    sys.exit(f"{' and '.join(failed)} found something: see above" if failed else None)


def launch_every_kernel(device: str) -> None:
    """Fused, plain and two-launch steps in every phase, padding, fold and fill, forced merge."""
    generator = torch.Generator(device).manual_seed(0)
    for layout in LAYOUTS:
        for interval in (layout.merge_interval, 1):
            launch_layout(replace(layout, merge_interval=interval), generator, device)


def launch_layout(layout: LogLayout, generator: torch.Generator, device: str) -> None:
    rows = layout.merge_interval + 2
    memory = SlotMemory.allocate(layout, rows + 1, device)
    # The last slot of the pool among them, and a row of padding.
    slot_ids = torch.arange(rows, dtype=torch.int32, device=device).flip(0) + 1
    slot_ids[0], slot_ids[1] = 0, rows
    positions = torch.arange(rows, dtype=torch.int32, device=device) + 4 * layout.merge_interval
    fold_and_fill(memory, slot_ids, positions - 1, positions)
    token = inputs(layout, rows, generator)
    out = torch.empty(rows, layout.value_heads, layout.value_dim, device=device)
    for n in range(2):
        deltalog_step(layout, token, memory, slot_ids, out)(positions + n)
    if layout.family.delta_rule:
        from deltalog_kernels.bench.two_launch import two_launch_step

        two_launch_step(layout, token, memory, slot_ids, out)(positions + 2)
    if layout.family is GDN:
        decay_ln, beta = gdn_gates(token.a, token.b, token.a_log, token.dt_bias)
        at = {"memory": memory, "slot_ids": slot_ids, "positions": positions + 3}
        gdn_step(token.q, token.k, token.v, decay_ln, beta, **at, out=out)
    merge(memory, slot_ids, positions + 4)


if __name__ == "__main__":
    main()
