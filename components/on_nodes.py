"""What of a task's configuration KFP hands to a launcher of several pods, instead of to the task's own pod."""

from kfp import dsl

PASSED_ON: list[dsl.TaskConfigField | dsl.TaskConfigPassthrough] = [
    dsl.TaskConfigField.RESOURCES,
    dsl.TaskConfigField.KUBERNETES_TOLERATIONS,
    dsl.TaskConfigField.KUBERNETES_NODE_SELECTOR,
    dsl.TaskConfigField.KUBERNETES_AFFINITY,
    # the launcher needs these too: it writes its journal to the same store
    dsl.TaskConfigPassthrough(field=dsl.TaskConfigField.ENV, apply_to_task=True),
    dsl.TaskConfigPassthrough(field=dsl.TaskConfigField.KUBERNETES_VOLUMES, apply_to_task=True),
]
