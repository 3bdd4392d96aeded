"""The file:// store: content decides the name, nothing is overwritten, nothing unverified is returned."""

import errno
import hashlib
import os
import shutil
import stat
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longstraw_core.artifacts import AlreadyPublished, FileStore, open_store, path_of_file_uri
from longstraw_core.artifacts.files import storage_error
from longstraw_core.spec import Descriptor, IntegrityError, Retryable, SpecError

BYTES = "application/octet-stream"


def staging_of(store: FileStore) -> list[str]:
    return os.listdir(store.root / "staging")


def corrupt(store: FileStore, descriptor: Descriptor, content: bytes) -> None:
    path = store.root / descriptor.uri
    path.unlink()
    path.write_bytes(content)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200))
def test_bytes_come_back_under_the_digest_that_hashlib_computes(store: FileStore, content: bytes) -> None:
    descriptor = store.put_blob(content, BYTES)
    digest = hashlib.sha256(content).hexdigest()
    assert descriptor == Descriptor(
        uri=f"blobs/sha256/{digest}", digest=f"sha256:{digest}", size=len(content), media_type=BYTES
    )
    assert store.get_bytes(descriptor) == content
    path = store.root / "blobs" / "sha256" / digest
    assert path.read_bytes() == content
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert path.stat().st_nlink == 1
    assert staging_of(store) == []


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (3 << 20) + 7])
def test_a_file_of_any_size_round_trips(store: FileStore, tmp_path: Path, size: int) -> None:
    content = hashlib.shake_128(b"seed").digest(size)
    (tmp_path / "source").write_bytes(content)
    descriptor = store.put_blob(tmp_path / "source", BYTES)
    assert descriptor.hex == hashlib.sha256(content).hexdigest()
    assert descriptor.size == size
    store.get_file(descriptor, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == content
    assert sorted(os.listdir(tmp_path)) == ["copy", "source", "store"]


def test_storing_the_same_content_again_changes_nothing(store: FileStore, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"same")
    first = store.put_blob(b"same", BYTES)
    before = os.stat(store.root / first.uri)
    assert store.put_blob(b"same", BYTES) == first == store.put_blob(tmp_path / "source", BYTES)
    after = os.stat(store.root / first.uri)
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert staging_of(store) == []


@pytest.mark.parametrize("evil", [b"", b"good!", b"goo", b"gooe"])
def test_a_corrupt_existing_blob_is_never_accepted(store: FileStore, tmp_path: Path, evil: bytes) -> None:
    descriptor = store.put_blob(b"good", BYTES)
    corrupt(store, descriptor, evil)
    (tmp_path / "source").write_bytes(b"good")
    for source in (b"good", tmp_path / "source"):
        with pytest.raises(IntegrityError, match="is corrupt: expected sha256:"):
            store.put_blob(source, BYTES)
    with pytest.raises(IntegrityError, match=r"expected .* observed"):
        store.get_bytes(descriptor)
    with pytest.raises(IntegrityError, match=r"expected .* observed"):
        store.get_file(descriptor, tmp_path / "copy")
    assert sorted(os.listdir(tmp_path)) == ["source", "store"]


def test_the_length_is_checked_before_the_digest(store: FileStore) -> None:
    descriptor = store.put_blob(b"good", BYTES)
    corrupt(store, descriptor, b"good and much longer")
    with pytest.raises(IntegrityError, match="expected 4 bytes, observed 20"):
        store.get_bytes(descriptor)
    lying = descriptor.model_copy(update={"size": 5})
    corrupt(store, descriptor, b"good")
    with pytest.raises(IntegrityError, match="expected 5 bytes, observed 4"):
        store.get_bytes(lying)


def test_a_missing_blob_and_a_descriptor_that_points_elsewhere_are_refused(store: FileStore) -> None:
    one, two = store.put_blob(b"one", BYTES), store.put_blob(b"two", BYTES)
    (store.root / one.uri).unlink()
    with pytest.raises(IntegrityError, match="is missing"):
        store.get_bytes(one)
    with pytest.raises(IntegrityError, match="name and digest must agree"):
        store.get_bytes(two.model_copy(update={"uri": one.uri}))
    for uri in ("file:///etc/passwd", "/etc/passwd", "../store/" + two.uri, "blobs/../" + two.uri, "a\0b"):
        with pytest.raises(IntegrityError):
            store.get_bytes(two.model_copy(update={"uri": uri}))


def test_a_destination_that_exists_is_left_alone(store: FileStore, tmp_path: Path) -> None:
    descriptor = store.put_blob(b"new", BYTES)
    (tmp_path / "taken").write_bytes(b"old")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("taken", "dangling"):
        with pytest.raises(SpecError, match="exists already"):
            store.get_file(descriptor, tmp_path / name)
    assert (tmp_path / "taken").read_bytes() == b"old"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("level", ["blobs", "blobs/sha256", "blob"])
def test_a_symlink_anywhere_in_the_store_is_refused(store: FileStore, tmp_path: Path, level: str) -> None:
    descriptor = store.put_blob(b"content", BYTES)
    path = store.root / (descriptor.uri if level == "blob" else level)
    os.rename(path, tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    with pytest.raises(IntegrityError, match="is a symlink"):
        store.get_bytes(descriptor)
    with pytest.raises(IntegrityError, match="is a symlink"):
        store.put_blob(b"content", BYTES)


def test_a_store_whose_root_is_a_symlink_is_refused(store: FileStore, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(store.root)
    with pytest.raises(IntegrityError, match="is a symlink"):
        FileStore(tmp_path / "link")


def test_a_fifo_in_place_of_a_blob_is_refused_without_waiting(store: FileStore) -> None:
    descriptor = store.put_blob(b"content", BYTES)
    (store.root / descriptor.uri).unlink()
    os.mkfifo(store.root / descriptor.uri)
    with pytest.raises(IntegrityError, match="special file"):
        store.get_bytes(descriptor)


@pytest.mark.parametrize("kind", ["missing", "symlink", "directory", "fifo"])
def test_a_source_that_is_no_regular_file_is_refused(store: FileStore, tmp_path: Path, kind: str) -> None:
    source = tmp_path / "source"
    if kind == "symlink":
        (tmp_path / "target").write_bytes(b"x")
        source.symlink_to("target")
    elif kind == "directory":
        source.mkdir()
    elif kind == "fifo":
        os.mkfifo(source)
    with pytest.raises((SpecError, IntegrityError), match="source"):
        store.put_blob(source, BYTES)
    assert staging_of(store) == []


def test_many_concurrent_writers_of_one_blob_all_succeed(store: FileStore, tmp_path: Path) -> None:
    content = os.urandom(1 << 20)
    (tmp_path / "source").write_bytes(content)
    barrier = threading.Barrier(8)

    def put(number: int) -> Descriptor:
        barrier.wait()
        return store.put_blob(content if number % 2 else tmp_path / "source", BYTES)

    with ThreadPoolExecutor(8) as pool:
        descriptors = list(pool.map(put, range(8)))
    assert len(set(descriptors)) == 1
    assert store.get_bytes(descriptors[0]) == content
    assert len(os.listdir(store.root / "blobs" / "sha256")) == 1
    assert staging_of(store) == []


def test_of_many_concurrent_creators_of_one_name_exactly_one_wins(store: FileStore) -> None:
    barrier = threading.Barrier(8)

    def create(number: int) -> Descriptor | AlreadyPublished:
        barrier.wait()
        try:
            return store.create_object("runs/r/0001/train/receipt.json", b"from %d" % number, BYTES)
        except AlreadyPublished as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(create, range(8)))
    (winner,) = [result for result in results if isinstance(result, Descriptor)]
    losers = [result for result in results if isinstance(result, AlreadyPublished)]
    assert len(losers) == 7
    assert all(loser.published == winner and loser.refused != winner for loser in losers)
    assert store.get_bytes(winner) in {b"from %d" % number for number in range(8)}
    assert isinstance(losers[0], Retryable)


def test_creating_a_named_object_again_with_the_same_bytes_succeeds(store: FileStore) -> None:
    first = store.create_object("runs/r/x", b"same", BYTES)
    assert store.create_object("runs/r/x", b"same", BYTES) == first
    assert store.exists("runs/r/x")
    assert not store.exists("runs/r/y")
    assert store.list_names("runs/") == ["runs/r/x"]
    assert store.list_names("absent/") == []


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/abs",
        "../up",
        "a/../b",
        "a//b",
        "./a",
        "a/",
        "blobs/sha256/x",
        "staging/x",
        "blobs",
        "a\\b",
        "a\nb",
        "\udcff",
    ],
)
def test_unsafe_and_reserved_names_are_refused(store: FileStore, name: str) -> None:
    with pytest.raises(SpecError):
        store.create_object(name, b"", BYTES)


def test_staging_of_a_dead_writer_is_cleared_and_of_a_living_one_kept(store: FileStore) -> None:
    store.put_blob(b"x", BYTES)
    (store.root / "staging" / "dead").write_bytes(b"half")
    with store._staged(b"being written") as staged:  # pyright: ignore[reportPrivateUsage]
        assert store.clear_stale_staging() == 1
        assert staging_of(store) == [staged.name]
    assert staging_of(store) == []
    assert FileStore(store.root.parent / "fresh", create=True).clear_stale_staging() == 0


def test_a_full_disk_is_retryable_and_denied_access_is_not(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int):
        def write(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        return write

    monkeypatch.setattr("longstraw_core.artifacts.files.os.write", fail(errno.ENOSPC))
    with pytest.raises(Retryable, match=r"storing 3 bytes .*No space left on device; free some space"):
        store.put_blob(b"new", BYTES)
    monkeypatch.setattr("longstraw_core.artifacts.files.os.write", fail(errno.EACCES))
    with pytest.raises(SpecError, match="Permission denied; give this user access"):
        store.create_object("runs/r/x", b"new", BYTES)
    monkeypatch.undo()
    assert staging_of(store) == []
    assert store.list_names() == []


@pytest.fixture
def one_mebibyte_disk(tmp_path: Path):
    """A file system of one MiB, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=False).returncode:
        pytest.skip("this user may not mount a tmpfs")
    try:
        yield disk
    finally:
        subprocess.run([shutil.which("umount") or "umount", disk], check=True)


def test_a_disk_that_is_really_full_leaves_nothing_behind_and_the_same_command_succeeds_later(
    one_mebibyte_disk: Path, tmp_path: Path
) -> None:
    ballast = one_mebibyte_disk / "ballast"
    ballast.write_bytes(bytes(700_000))
    store = FileStore(one_mebibyte_disk / "store", create=True)
    content = os.urandom(500_000)
    (tmp_path / "source").write_bytes(content)
    for source in (content, tmp_path / "source"):
        with pytest.raises(Retryable, match="No space left on device"):
            store.put_blob(source, BYTES)
    elsewhere = FileStore(tmp_path / "elsewhere", create=True)
    descriptor = elsewhere.put_blob(content, BYTES)
    with pytest.raises(Retryable, match="No space left on device"):
        elsewhere.get_file(descriptor, one_mebibyte_disk / "copy")
    assert store.list_names() == []
    assert sorted(os.listdir(one_mebibyte_disk)) == ["ballast", "store"]
    ballast.unlink()
    assert store.put_blob(tmp_path / "source", BYTES) == descriptor
    assert store.get_bytes(descriptor) == content


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_store_is_a_clear_error(store: FileStore) -> None:
    store.root.chmod(0o555)
    try:
        with pytest.raises(SpecError, match="Permission denied"):
            store.put_blob(b"new", BYTES)
    finally:
        store.root.chmod(0o755)


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EDQUOT, Retryable), (errno.EIO, Retryable), (errno.EROFS, SpecError), (errno.ENAMETOOLONG, SpecError)],
)
def test_storage_errors_say_what_the_caller_can_do(number: int, kind: type[Exception]) -> None:
    assert type(storage_error(OSError(number, os.strerror(number)), "writing x")) is kind


def test_uris_open_the_store_they_name(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/a%20b", create=True)
    assert (tmp_path / "a b").is_dir()
    assert open_store(store.uri).uri == store.uri
    assert open_store("file://./a%20b", base=tmp_path).uri == store.uri
    assert path_of_file_uri("file://../x", base=tmp_path / "y") == tmp_path / "x"
    for uri in ("s4://bucket", "file://host/path", "/plain", "file:/one-slash", "file://%00"):
        with pytest.raises(SpecError):
            open_store(uri)
    with pytest.raises(SpecError, match="does not exist"):
        open_store(f"file://{tmp_path}/absent")
    assert not (tmp_path / "absent").exists()
