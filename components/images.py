"""Which container image a component runs in: the digest-pinned entry of the lock, or a name no registry serves."""

import json
import os
from pathlib import Path
from typing import Literal

IMAGE_LOCK_VARIABLE = "LONGSTRAW_IMAGES_LOCK"
DEFAULT_IMAGE_LOCK = Path(__file__).resolve().parent.parent / "images" / "images.lock.json"

ImageRole = Literal["control", "trainer", "sampler"]


def image_lock() -> dict[str, str]:
    """Return role → `repository@sha256:…` from the lock file; empty where no image has been published."""
    path = Path(os.environ.get(IMAGE_LOCK_VARIABLE, str(DEFAULT_IMAGE_LOCK)))
    if not path.exists():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))


def image(role: ImageRole) -> str:
    """Return the image of `role`. Without a lock entry the pipeline can only run on this machine."""
    return image_lock().get(role, f"localhost/longstraw-python/{role}:unpublished")
