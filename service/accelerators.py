"""The GPUs that pools run on: how Ray names them, and their memory."""

from dataclasses import dataclass

ACCELERATOR_LABEL = "ray.io/accelerator-type"
"""The label by which Ray itself says what a node has."""


@dataclass(frozen=True)
class Accelerator:
    """label: what Ray calls it. memory_bytes: of one GPU, as its driver reports it."""

    label: str
    memory_bytes: int


ACCELERATORS = {
    "H200": Accelerator("H200", 143_771 * 2**20),
    "RTX4090": Accelerator("GeForce-RTX-4090", 24_564 * 2**20),
}
