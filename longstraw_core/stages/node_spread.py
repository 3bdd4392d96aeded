"""How a stage's processes are dealt to its pods: checked before anything is created."""

from longstraw_core.spec import SpecError, TransactionSpec
from longstraw_core.spec.receipts import StageName


def processes_per_node(stage: StageName, spec: TransactionSpec, nodes: int, accelerators: int) -> int:
    """Return how many processes of the stage every node runs.

    Args:
        stage: `sample`, or a stage on context-parallel ranks.
        spec: The specification that the pods will run.
        nodes: Pods of the stage, each on a node of its own.
        accelerators: Accelerators of one pod; 0 where the stage runs on CPUs.

    Raises:
        SpecError: the processes cannot be dealt evenly, or a pod's accelerators are not as many as they must be.
    """
    place = f"cluster.stages.{stage}.nodes: {nodes}"
    if stage == "sample":
        return _of_server(spec, place, nodes, accelerators)
    ranks = spec.layout.context_parallel
    if ranks % nodes:
        raise SpecError(f"{place}: layout.context_parallel is {ranks}, which cannot be dealt evenly to them")
    each = ranks // nodes
    if accelerators and accelerators != each:
        raise SpecError(
            f"{place}: layout.context_parallel {ranks} is {_count(each, 'rank')} per pod, and a pod has "
            f"{_count(accelerators, 'accelerator')}; make both equal"
        )
    return each


def check_one_pod(stage: StageName, spec: TransactionSpec, accelerators: int) -> None:
    """Refuse a stage in one pod that has accelerators, but fewer than the stage has ranks.

    Raises:
        SpecError: naming the stage, its ranks and the pod's accelerators.
    """
    if stage == "sample":
        _of_server(spec, "cluster.stages.sample", 1, accelerators)
        return
    ranks = spec.layout.context_parallel
    if 0 < accelerators < ranks:
        raise SpecError(
            f"layout.context_parallel: {_count(ranks, 'rank')} of stage {stage} run in one pod, which has "
            f"{_count(accelerators, 'accelerator')}; give the pod as many, or cluster.stages.{stage}.nodes more nodes"
        )


def _of_server(spec: TransactionSpec, place: str, nodes: int, accelerators: int) -> int:
    sampling = spec.sampling
    if sampling.engine != "sglang":
        if nodes > 1:
            raise SpecError(f"{place}: sampling.engine {sampling.engine} samples in one pod")
        return 1
    server = sampling.server
    if nodes != server.nodes:
        raise SpecError(f"{place}: sampling.server.nodes is {server.nodes}; give both the same number")
    each = server.tensor_parallel * server.pipeline_parallel // nodes
    if accelerators and accelerators < each:
        raise SpecError(
            f"{place}: sampling.server has {_count(each, 'rank')} per pod (tensor_parallel × pipeline_parallel / "
            f"nodes), and a pod has {_count(accelerators, 'accelerator')}; give a pod as many"
        )
    return each


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
