"""Multi-pod stages on Kubernetes: placement, ownership, watching, scoped cleanup; knows no stage and no torch."""
