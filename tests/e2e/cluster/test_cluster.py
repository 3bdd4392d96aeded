"""The compiled pipeline on a real cluster, for two teams. Skipped unless `make e2e-kind` runs it."""

import json
import time

from longstraw_core.cluster.names import STAGE_LABEL
from tests.e2e import expectations
from tests.e2e.cluster.driver import Access, ClusterDriver, ClusterRun
from tests.e2e.cluster.manifests import BUCKET
from tests.e2e.cluster.site import Site

BEGIN_SECONDS, GONE_SECONDS = 600.0, 180.0
QUEUES = ("localqueues.kueue.x-k8s.io", "workloads.kueue.x-k8s.io")


def two_nodes(driver: ClusterDriver, name: str) -> ClusterRun:
    """Start a run whose `capture_prefix` is two pods of a Job."""
    return driver.submit(driver.specification(name, nodes=2), driver.images())


def workers(access: Access) -> list[str]:
    """Names of the worker pods that live, as `pod/…`."""
    selector = f"{STAGE_LABEL}=capture_prefix,batch.kubernetes.io/job-name"
    return access.kubectl(
        "get", "pods", "--selector", selector, "--field-selector", "status.phase=Running", "--output", "name"
    ).split()


def wait_for_workers(run: ClusterRun) -> list[str]:
    deadline = time.monotonic() + BEGIN_SECONDS
    while len(found := workers(run.access)) < 2:
        assert time.monotonic() < deadline, run.text()[-4000:]
        time.sleep(1)
    return found


def test_two_transactions_verify_and_name_the_locked_images(driver: ClusterDriver) -> None:
    run = driver.start("two-transactions", transactions=2, images=driver.images())
    expectations.completes_with_the_locked_images(driver, run, "two-transactions", 2)


def test_a_pipeline_uploaded_in_the_ui_completes(driver: ClusterDriver) -> None:
    run = driver.upload_in_the_ui("from-the-ui")
    expectations.completes_with_the_locked_images(driver, run, "from-the-ui", 1)


def test_the_stock_command_completes(driver: ClusterDriver) -> None:
    run = driver.kfp_run_create("stock-command")
    expectations.completes_with_the_locked_images(driver, run, "stock-command", 1)


def test_the_image_of_another_role_is_refused_by_name(driver: ClusterDriver) -> None:
    expectations.refuses_the_image_of_another_role(driver, "other-role")


def test_a_digest_that_the_registry_does_not_have_is_an_error_that_names_it(driver: ClusterDriver) -> None:
    expectations.names_a_digest_that_the_registry_does_not_have(driver, "absent-digest")


def test_a_stage_that_is_killed_is_tried_again(driver: ClusterDriver) -> None:
    expectations.survives_a_stage_that_is_killed(driver, "killed-stage")


def test_a_run_whose_pod_was_deleted_is_finished_by_the_next_with_what_was_there(driver: ClusterDriver) -> None:
    name = "deleted-pod"
    run = driver.start(name, transactions=1, images=driver.images())
    run.delete_pod("capture_prefix")
    succeeded = run.wait(expectations.LONG)
    before = expectations.receipts(driver, name)
    if not succeeded:  # Argo does not retry a pod that was deleted; the same run is started again
        run = driver.start(name, transactions=1, images=driver.images())
    expectations.completes_with_the_locked_images(driver, run, name, 1)
    after = expectations.receipts(driver, name)
    assert {stage: after[stage] for stage in before} == before


def test_a_stage_of_two_pods_survives_the_loss_of_one(driver: ClusterDriver) -> None:
    run = two_nodes(driver, "lost-worker")
    driver.access.kubectl("delete", wait_for_workers(run)[1], "--wait=false")
    expectations.completes_with_the_locked_images(driver, run, "lost-worker", 1)


def test_nothing_is_left_of_a_run_that_was_terminated(driver: ClusterDriver) -> None:
    run = two_nodes(driver, "terminated")
    wait_for_workers(run)
    cancelled = driver.access.longstraw("cancel", run.identity, "--endpoint", driver.access.kubeflow, "-f")
    assert cancelled.returncode == 0, cancelled.stderr
    selector = f"{STAGE_LABEL}=capture_prefix"
    deadline = time.monotonic() + GONE_SECONDS
    while left := driver.access.kubectl("get", "jobs,services", "--selector", selector, "--output", "name"):
        assert time.monotonic() < deadline, f"left: {left}"
        time.sleep(2)
    assert workers(driver.access) == []
    assert [pod for pod in run.pods() if pod["status"]["phase"] in ("Pending", "Running")] == []
    listed = driver.access.longstraw("cleanup", "terminated", "--store", driver.store(), "--dry-run", "-o", "json")
    assert listed.returncode == 0, listed.stderr
    assert json.loads(listed.stdout.splitlines()[-1])["removed"] == []


def test_a_team_cannot_reach_the_prefix_of_another(site: Site, driver: ClusterDriver) -> None:
    search, law = site.teams["search"], site.teams["law"]
    key = f"{law.team.prefix}/secret-of-law"
    law.store_client().put_object(Bucket=BUCKET, Key=key, Body=b"of law alone")
    expectations.a_prefix_is_closed_to_others(search.store_client(), BUCKET, search.team.prefix, law.team.prefix, key)
    assert law.store_client().get_object(Bucket=BUCKET, Key=key)["Body"].read() == b"of law alone"


def test_a_team_may_do_nothing_in_the_namespace_of_another(site: Site) -> None:
    search, law = site.teams["search"], site.teams["law"]
    own = f"{search.team.namespace}:{search.team.account}"
    assert search.may(own, "create", "jobs.batch")  # so that `no` means something
    for account in (own, f"{search.team.namespace}:pipeline-runner", f"{search.team.namespace}:default"):
        for resource in ("secrets", "configmaps", "pods", "jobs.batch", "workflows.argoproj.io", *QUEUES):
            for verb in ("get", "list", "watch", "create", "delete", "patch"):
                assert not law.may(account, verb, resource), (account, verb, resource)


def test_a_pod_of_one_team_does_not_reach_the_services_of_another(site: Site, driver: ClusterDriver) -> None:
    search, law = site.teams["search"], site.teams["law"]
    program = (
        "import socket, sys\n"
        "def reaches(host, port):\n"
        "    try:\n"
        "        socket.create_connection((host, port), timeout=10).close()\n"
        "    except OSError:\n"
        "        return False\n"
        "    return True\n"
        "print(reaches(sys.argv[1], 8888), reaches(sys.argv[2], 8888))"
    )
    hosts = [f"ml-pipeline.{access.team.namespace}" for access in (search, law)]
    said = search.kubectl(
        *("run", "probe", "--rm", "--attach", "--quiet", "--restart=Never", f"--image={driver.images()['control']}"),
        *("--command", "--", "python3", "-c", program, *hosts),
    )
    assert said.split()[:2] == ["True", "False"], said
