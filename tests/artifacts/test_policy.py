"""Given runs that start from one checkpoint, when both want to become current, then one does and the other is told."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longstraw_core.artifacts import (
    PolicyMoved,
    advance_policy,
    check_policy_parent,
    open_store,
    read_policy,
    verify_store,
)
from longstraw_core.artifacts.store import Store
from longstraw_core.spec import CheckpointManifest, Descriptor, canonical_json
from longstraw_core.spec.errors import IntegrityError, SpecError
from tests.artifacts.conftest import publish_run_into
from tests.artifacts.test_kills import start, wait
from tests.servers.seaweedfs import S3Server

Publish = Callable[..., tuple[Descriptor, CheckpointManifest]]


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store of either kind."""
    if request.param == "file":
        return open_store((tmp_path / "store").as_uri(), create=True)
    server: S3Server = request.getfixturevalue("seaweedfs_server")
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return open_store(f"s3://artifacts/policy-{os.getpid()}-{tmp_path.name}", create=True)


@pytest.fixture
def publish(store: Store, snapshot: Path, data_file: Path, tmp_path: Path) -> Publish:
    """Publish a run of one transaction and return its checkpoint."""

    def publish_run(run: str, parent: Descriptor | None = None, lineage: int = 0):
        checkpoint = publish_run_into(
            store, tmp_path, snapshot, data_file, run=run, transactions=1, parent=parent, lineage=lineage
        )
        return checkpoint, CheckpointManifest.model_validate_json(store.get_bytes(checkpoint))

    return publish_run


def test_a_policy_moves_from_a_checkpoint_to_its_child_and_the_loser_keeps_its_own(
    store: Store, publish: Publish
) -> None:
    assert read_policy(store, "main") is None
    first = publish("first")
    advance_policy(store, "main", *first)
    check_policy_parent(store, "main", first[0])
    second, rival = publish("second", first[0], 1), publish("rival", first[0], 1)
    pointer = advance_policy(store, "main", *second)
    assert (pointer.run, pointer.lineage, pointer.checkpoint) == ("second", 2, second[0])
    assert advance_policy(store, "main", *second) == pointer  # again changes nothing
    with pytest.raises(PolicyMoved, match="another run moved it first") as lost:
        advance_policy(store, "main", *rival)
    assert rival[0].uri in str(lost.value)
    assert f'"digest":"{second[0].digest}"' in str(lost.value)
    assert store.get_bytes(rival[0])
    assert read_policy(store, "main") == pointer
    with pytest.raises(PolicyMoved, match="this run starts from a fresh adapter"):
        check_policy_parent(store, "main", None)
    third = publish("third", second[0], 2)
    assert advance_policy(store, "main", *third).lineage == 3
    assert read_policy(store, "other") is None


def test_exactly_one_of_several_processes_becomes_the_child(store: Store, publish: Publish) -> None:
    parent = publish("parent")
    advance_policy(store, "main", *parent)
    rivals = [publish(f"rival-{number}", parent[0], 1) for number in range(4)]
    uri = store.uri
    processes = [start(lambda rival=rival: advance_policy(open_store(uri), "main", *rival)) for rival in rivals]
    assert sorted(wait(process) for process in processes) == [0, 1, 1, 1]
    pointer = read_policy(store, "main")
    assert pointer is not None
    assert pointer.checkpoint in [checkpoint for checkpoint, _ in rivals]


def test_a_winner_that_was_killed_before_its_receipt_is_no_loser_when_others_have_gone_on(
    store: Store, publish: Publish
) -> None:
    first = publish("first")
    advance_policy(store, "main", *first)
    second = publish("second", first[0], 1)
    advance_policy(store, "main", *second)
    third = publish("third", second[0], 2)
    pointer = advance_policy(store, "main", *third)
    for earlier in (first, second):
        assert advance_policy(store, "main", *earlier) == pointer
    for loser in (publish("loser"), publish("rival", first[0], 1), publish("late", second[0], 2)):
        with pytest.raises(PolicyMoved):
            advance_policy(store, "main", *loser)
    assert read_policy(store, "main") == pointer


@pytest.mark.parametrize(
    "change",
    [
        {"lineage": 7},
        {"run": "other"},
        {"transaction": 2},
        {"checkpoint": {"media_type": "application/json"}},
        {"checkpoint": {"size": 1}},
    ],
)
def test_a_pointer_that_says_something_else_than_its_checkpoint_is_a_fault(
    store: Store, publish: Publish, change: dict[str, Any]
) -> None:
    name = "policies/main/current.json"
    advance_policy(store, "main", *publish("first"))
    assert verify_store(store).faults == []
    stored = store.read_pointer(name)
    assert stored is not None
    fields = json.loads(stored.content)
    for key, value in change.items():
        fields[key] = fields[key] | value if isinstance(value, dict) else value
    assert store.replace_pointer(name, canonical_json(fields), stored)
    assert name in {fault.path for fault in verify_store(store).faults}


def test_an_answer_that_was_lost_does_not_make_the_winner_a_loser(store: Store) -> None:
    name = "policies/main/current.json"
    assert store.replace_pointer(name, b"one", None)
    assert not store.replace_pointer(name, b"two", None)
    stored = store.read_pointer(name)
    assert stored is not None
    assert store.replace_pointer(name, b"two", stored)
    assert not store.replace_pointer(name, b"three", stored)


def test_a_pointer_that_was_tampered_with_is_refused(store: Store, publish: Publish) -> None:
    advance_policy(store, "main", *publish("first"))
    stored = store.read_pointer("policies/main/current.json")
    assert stored is not None
    store.replace_pointer("policies/other/current.json", stored.content, None)
    with pytest.raises(IntegrityError, match="pointer of policy 'main'"):
        read_policy(store, "other")
    store.replace_pointer("policies/main/current.json", b"{}", stored)
    with pytest.raises(IntegrityError, match="is not a policy pointer"):
        read_policy(store, "main")
    for policy in ("", "UPPER", "a/b", "..", "-a"):
        with pytest.raises(SpecError):
            read_policy(store, policy)
