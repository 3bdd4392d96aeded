"""Which container image a role runs in: the digest-pinned entry of the lock, or a name no registry serves."""

import os
from pathlib import Path

from longstraw_core.spec import SpecError
from longstraw_core.spec.images import ROLES, ImageRole, parse_image_lock, require_roles

IMAGE_LOCK_VARIABLE = "LONGSTRAW_IMAGES_LOCK"
DEFAULT_IMAGE_LOCK = Path(__file__).resolve().parent.parent / "images" / "images.lock.json"


def image_lock_path() -> Path:
    """Where the lock is: what the environment says, or `images/images.lock.json` of this tree."""
    return Path(os.environ.get(IMAGE_LOCK_VARIABLE) or DEFAULT_IMAGE_LOCK)


def image_lock(path: Path | None = None) -> dict[str, str]:
    """Return name → `repository@sha256:…` from a lock file.

    Args:
        path: The lock that must exist; None means the default one, which is empty where no image has been published.

    Raises:
        SpecError: the file is not there or not readable, an entry is not pinned by digest, or a role has none.
    """
    source = path or image_lock_path()
    named = path is not None or bool(os.environ.get(IMAGE_LOCK_VARIABLE))
    if not source.exists() and not named:
        return {}
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SpecError(f"{source}: {reason}; an image lock is an object, name → repository@sha256:…") from error
    lock = parse_image_lock(text, str(source))
    require_roles(lock, str(source))
    return lock


def unpublished(role: ImageRole) -> str:
    """The image reference of a pipeline that can only run on this machine: no registry serves it."""
    return f"localhost/longstraw-python/{role}:unpublished"


def pipeline_images(lock: dict[str, str]) -> dict[ImageRole, str]:
    """Return every role's image from a lock; of an empty lock, the unpublished ones."""
    return {role: lock[role] if lock else unpublished(role) for role in ROLES}
