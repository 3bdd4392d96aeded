"""Given an `s3://` store on a real server, when transactions run stage by stage, then they verify from any receipt."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from longstraw_core.artifacts import PolicyMoved, find_receipt, open_store, read_policy, receipt_name
from longstraw_core.cli.main import main
from longstraw_core.spec import SpecError
from tests.servers.seaweedfs import S3Server

from .scripted import AFTER_SAMPLE, BEFORE_SAMPLE, group_rollouts, make_spec, prompts_of, publish_rollouts, run


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def uri(seaweedfs_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store that receipts are signed in, and the environment that leads to it."""
    for name, value in seaweedfs_server.environment().items():
        monkeypatch.setenv(name, value)
    key = Ed25519PrivateKey.generate()
    (tmp_path / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "key.pub.pem").write_bytes(public)
    monkeypatch.setenv("LONGSTRAW_SIGNING_KEY", str(tmp_path / "key.pem"))
    monkeypatch.setenv("LONGSTRAW_VERIFY_KEY", "")  # `verify` sets it: absent before, and so absent afterwards
    return f"s3://artifacts/team-{os.getpid()}-{tmp_path.name}"


def test_signed_transactions_share_a_policy_and_verify_from_any_receipt(
    spec_fields: dict[str, Any],
    spec_file: Path,
    untrained_snapshot: Path,
    uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seaweedfs_server: S3Server,
) -> None:
    registered = invoke("model", "snapshot", str(untrained_snapshot), "--store", uri, "-o", "json")
    assert registered.exit_code == 0, registered.output
    digest = json.loads(registered.output)["digest"]
    overrides = (f"storage.uri={uri}", "storage.policy=main", f"model.digest={digest}")
    ours, rival = (make_spec(spec_fields, *overrides, f"name={name}") for name in ("ours", "rival"))
    for spec in (ours, rival):
        for stage in BEFORE_SAMPLE:
            run(spec, stage)
        groups = [
            group_rollouts(prompt, [f"Answer: {prompt.ground_truth}"] * 2 + ["Answer: 0"] * 2)
            for prompt in prompts_of(spec)
        ]
        publish_rollouts(spec, [rollout for group in groups for rollout in group])
        for stage in AFTER_SAMPLE[:-1]:
            run(spec, stage)
    run(ours, "validate_run")
    store = open_store(uri)
    checkpoint = run(rival, "manifest_checkpoint").receipt.predicate.outputs["checkpoint_manifest"]
    with pytest.raises(PolicyMoved, match="another run moved it first") as lost:
        run(rival, "validate_run")
    assert checkpoint.uri in str(lost.value)
    assert store.get_bytes(checkpoint)
    assert find_receipt(store, "rival", 1, "validate_run") is None
    pointer = read_policy(store, "main")
    assert pointer is not None
    assert pointer.run == "ours"
    late = make_spec(spec_fields, *overrides, "name=late")
    with pytest.raises(SpecError, match="starts from a fresh adapter"):
        run(late, "audit_data")  # told before any work

    monkeypatch.delenv("LONGSTRAW_SIGNING_KEY")
    receipt = f"{uri}/{receipt_name('ours', 1, 'capture_prefix')}"
    key = ("--verify-key", str(tmp_path / "key.pub.pem"))
    checked = invoke("verify", receipt, "--deep", "-o", "json", *key)
    monkeypatch.delenv("LONGSTRAW_VERIFY_KEY")
    assert checked.exit_code == 0, checked.output
    summary = json.loads(checked.output)
    assert (summary["ok"], summary["receipts"], summary["unchecked"]) == (True, 9, [])
    assert (summary["complete"], summary["incomplete"]) == (True, [])
    assert invoke("verify", uri, "--run", "ours").exit_code == 0
    whole = invoke("verify", uri, "-o", "json")  # the rival that lost never validated
    assert whole.exit_code == 13
    verdict = json.loads(whole.stdout.splitlines()[0])
    assert (verdict["ok"], verdict["complete"]) == (True, False)
    assert verdict["incomplete"] == [{"run": "rival", "transaction": 1, "missing": ["validate_run"]}]
    assert invoke("verify", uri, "--allow-incomplete").exit_code == 0

    # the command of a pod: the stage is done already, is verified and reused, and signs nothing
    again = invoke(
        "stage", "train", str(spec_file), "--store", uri, "--set", "name=ours", "--set", "storage.policy=main",
        "--set", f"model.digest={digest}", "-o", "json",
    )  # fmt: skip
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout.splitlines()[-1])["reused"] is True

    trained = run(ours, "train").receipt.predicate.outputs["checkpoint"]
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    seaweedfs_server.client().put_object(Bucket=bucket, Key=f"{prefix}/{trained.uri}", Body=b"{}")
    seaweedfs_server.client().delete_object(
        Bucket=bucket, Key=f"{prefix}/{receipt_name('ours', 1, 'sample').replace('receipt', 'receipt.dsse')}"
    )
    faulty = invoke("verify", receipt, "-o", "json", *key)
    monkeypatch.delenv("LONGSTRAW_VERIFY_KEY")
    assert faulty.exit_code == 11
    faults = {
        (fault["kind"], fault["path"])
        for fault in map(json.loads, faulty.stdout.splitlines())
        if fault["event"] == "fault"
    }
    assert ("changed", trained.uri) in faults
    assert ("signature", receipt_name("ours", 1, "sample")) in faults


def test_a_stage_that_could_not_sign_does_no_work(
    spec_fields: dict[str, Any], uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LONGSTRAW_SIGNING_KEY")
    monkeypatch.setenv("LONGSTRAW_VERIFY_KEY", str(tmp_path / "key.pub.pem"))
    with pytest.raises(SpecError, match="LONGSTRAW_SIGNING_KEY is not"):
        run(make_spec(spec_fields, f"storage.uri={uri}"), "audit_data")
    with pytest.raises(SpecError, match="is empty"):
        open_store(uri)
