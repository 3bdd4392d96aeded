"""What the project knows of Kubeflow Pipelines from outside a run: compiled pipelines, and the API server."""
