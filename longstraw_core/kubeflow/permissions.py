"""The question whether we have the permissions that the cluster's list names."""

from collections.abc import Iterable
from typing import Any

from longstraw_core.cluster.permissions import Permission
from longstraw_core.kubeflow.kubernetes_access import TIMEOUT_SECONDS, KubernetesAccess, kubernetes_errors


def missing_permissions(access: KubernetesAccess, permissions: Iterable[Permission]) -> list[Permission]:
    """Return those that a SelfSubjectAccessReview denies in the namespace of `access`."""
    from kubernetes import client

    reviews: Any = client.AuthorizationV1Api(access.client)
    missing: list[Permission] = []
    for permission in permissions:
        resource, _, subresource = permission.resource.partition("/")
        attributes = client.V1ResourceAttributes(
            namespace=access.namespace,
            group=permission.group,
            resource=resource,
            subresource=subresource or None,
            verb=permission.verb,
        )
        body = client.V1SelfSubjectAccessReview(
            spec=client.V1SelfSubjectAccessReviewSpec(resource_attributes=attributes)
        )
        with kubernetes_errors(access.server, f"asking whether we may {permission}"):
            answer = reviews.create_self_subject_access_review(body, _request_timeout=TIMEOUT_SECONDS)
        if not answer.status.allowed:
            missing.append(permission)
    return missing
