"""Seeds of sampled groups, the same for every engine."""

import hashlib


def rollout_seed(seed: int, transaction: int, prompt_id: str) -> int:
    """Return the 63-bit seed of one prompt's group; it does not depend on the order in which prompts are sampled."""
    content = f"longstraw rollout\0{seed}\0{transaction}\0{prompt_id}".encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> 1
