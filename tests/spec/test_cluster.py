"""Section `cluster`: what Kubernetes would refuse hours later is refused when the specification is read."""

from typing import Any

import pytest
import yaml

from longstraw_core.spec import SpecError, TransactionSpec
from longstraw_core.spec.parse import parse_transaction_spec


def parse(cluster: dict[str, Any]) -> TransactionSpec:
    fields = {
        "name": "demo",
        "model": {"snapshot": "model", "family": "qwen3_5_text"},
        "data": {"path": "rows.jsonl"},
        "cluster": cluster,
    }
    return parse_transaction_spec(yaml.safe_dump(fields), "spec.yaml")


def test_one_field_of_a_role_leaves_the_others_as_they_are() -> None:
    trainer = parse({"trainer": {"memory": "512Gi"}}).cluster.trainer
    assert (trainer.memory, trainer.accelerators, trainer.timeout_minutes) == ("512Gi", 1, 1440)


def test_a_toleration_becomes_what_the_kubernetes_api_reads() -> None:
    (toleration,) = parse(
        {"tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoExecute", "seconds": 60}]}
    ).cluster.tolerations
    assert toleration.to_kubernetes() == {
        "key": "gpu",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": 60,
    }


@pytest.mark.parametrize(
    ("cluster", "place"),
    [
        ({"trainer": {"cpu": "0"}}, "cluster.trainer.cpu"),
        ({"trainer": {"cpu": 8}}, "cluster.trainer.cpu"),
        ({"trainer": {"memory": "64 GB"}}, "cluster.trainer.memory"),
        ({"trainer": {"memory": "64gi"}}, "cluster.trainer.memory"),
        ({"control": {"accelerators": 1}}, "cluster.control.accelerators"),
        ({"stages": {"trian": {"cpu": "1"}}}, "cluster.stages.trian"),
        ({"run_as_user": 0}, "cluster.run_as_user"),
        ({"queue": "a/b"}, "cluster.queue"),
        ({"store_secret": "Store"}, "cluster.store_secret"),
        ({"tolerations": [{"value": "x"}]}, "cluster.tolerations"),
        ({"tolerations": [{"key": "a", "operator": "Exists", "value": "x"}]}, "cluster.tolerations"),
        ({"tolerations": [{"key": "a", "seconds": 3, "effect": "NoSchedule"}]}, "cluster.tolerations"),
        ({"volumes": [{"claim": "a", "mount_path": "/scratch/x"}]}, "cluster.volumes"),
        ({"volumes": [{"claim": "a", "mount_path": "/a/../b"}]}, "cluster.volumes"),
        ({"volumes": [{"claim": "a", "mount_path": "data"}]}, "cluster.volumes"),
        ({"volumes": [{"claim": "a", "mount_path": "/etc/longstraw-certificates/x"}]}, "cluster.volumes"),
        ({"volumes": [{"claim": "scratch", "mount_path": "/data"}]}, "every pod has"),
        ({"volumes": [{"claim": "kfp-launcher", "mount_path": "/data"}]}, "every pod has"),
        ({"volumes": [{"claim": "team.data", "mount_path": "/data"}]}, "the pod's volume has its name"),
        ({"volumes": [{"claim": "a" * 64, "mount_path": "/data"}]}, "the pod's volume has its name"),
        ({"store_authority": {"config_map": "shared-memory"}}, "every pod has"),
        ({"volumes": [{"claim": "a", "mount_path": "/a"}], "store_authority": {"config_map": "a"}}, "store_authority"),
        ({"store_authority": {"config_map": "a.b"}}, "cluster.store_authority.config_map"),
        ({"store_authority": {"config_map": "a", "key": "../a"}}, "cluster.store_authority.key"),
        ({"volumes": [{"claim": "a", "mount_path": "/a"}, {"claim": "a", "mount_path": "/b"}]}, "cluster"),
    ],
)
def test_a_wrong_field_is_named(cluster: dict[str, Any], place: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse(cluster)
    assert place in str(refused.value)
