"""The image lock: repository@sha256:… and nothing else."""

import json

import pytest

from longstraw_core.spec import SpecError
from longstraw_core.spec.images import parse_image_lock, require_roles

DIGEST = "sha256:" + "5" * 64


def lock(reference: object) -> str:
    return json.dumps({"trainer": reference})


@pytest.mark.parametrize(
    "repository", ["registry.example/longstraw/trainer", "localhost:5000/trainer", "10.0.0.1:80/a/b-c_d.e/f"]
)
def test_a_repository_with_a_digest_is_taken_as_it_is(repository: str) -> None:
    assert parse_image_lock(lock(f"{repository}@{DIGEST}"), "lock") == {"trainer": f"{repository}@{DIGEST}"}


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("repo/x:v1", "names a tag"),
        ("repo/x", "has no digest"),
        ("registry.example:5000/x", "has no digest"),
        ("repo/x@sha256:" + "5" * 63, "63 hex digits, sha256 has 64"),
        ("repo/x@sha256:" + "5" * 65, "65 hex digits"),
        ("repo/x@sha256:" + "G" * 64, "lower-case hex"),
        ("repo/x@sha256:" + "A" * 64, "lower-case hex"),
        ("repo/x@sha512:" + "5" * 128, "sha256: and 64"),
        (f"repo/x:v1@{DIGEST}", "tag besides the digest"),
        (f"repo/x@{DIGEST}\n", "sha256: and 64"),
        (f"Repo/X@{DIGEST}", "is not registry/repository"),
        (f"x@{DIGEST}", "is not registry/repository"),
        (f"repo//x@{DIGEST}", "is not registry/repository"),
        (f"{{{{$.inputs}}}}/x@{DIGEST}", "is not registry/repository"),
    ],
)
def test_anything_else_is_refused_with_the_way_to_a_digest(reference: str, reason: str) -> None:
    with pytest.raises(SpecError, match="skopeo inspect") as refused:
        parse_image_lock(lock(reference), "my.lock.json")
    assert reason in str(refused.value)
    assert "my.lock.json: trainer:" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "one object"),
        ('{"a": 3}', "must be a text"),
        (f'{{"a": "r/x@{DIGEST}", "a": "r/y@{DIGEST}"}}', "'a' is there twice"),
    ],
)
def test_a_lock_is_one_object_of_texts(text: str, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        parse_image_lock(text, "lock")


def test_every_role_of_the_pipeline_needs_an_image() -> None:
    with pytest.raises(SpecError, match="no image for control, sampler"):
        require_roles(parse_image_lock(lock(f"r/x@{DIGEST}"), "lock"), "lock")
