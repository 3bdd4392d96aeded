"""Samples the groups of many prompts from an SGLang server, a bounded number of responses at a time."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from longstraw_core.rollout.reply import Wanted
from longstraw_core.rollout.sglang_client import SglangClient
from longstraw_core.spec import NumericError, Rollout, StageFailed
from longstraw_core.spec.transaction import SamplingSpec

Progress = Callable[[str, int, int], None]
GroupFinished = Callable[[str, list[Rollout]], None]


@dataclass
class _Budget:
    """Response tokens that may still be sampled; None means any number."""

    left: int | None

    def take(self, tokens: int) -> bool:
        if self.left is None:
            return True
        if tokens > self.left:
            return False
        self.left -= tokens
        return True

    def give_back(self, tokens: int) -> None:
        if self.left is not None:
            self.left += tokens


def probe(client: SglangClient, wanted: Wanted) -> None:
    """Ask for one token, so that an adapter the server cannot use shows before the sampling: it is loaded only now.

    Raises:
        StageFailed, NumericError: see `SglangClient.sample`.
    """
    short = Wanted(**{**vars(wanted), "max_tokens": 1})
    try:
        client.sample(short, timeout_seconds=600.0)
    except (StageFailed, NumericError) as failure:
        raise type(failure)(f"probe of one token: {failure}") from failure


def sample_groups(
    client: SglangClient,
    groups: Sequence[Sequence[Wanted]],
    sampling: SamplingSpec,
    *,
    finished: GroupFinished,
    progress: Progress | None = None,
    tokens_used: int = 0,
    check_alive: Callable[[], None] | None = None,
) -> None:
    """Sample every response of every group; `finished` gets a prompt's id and its whole group as soon as it is there.

    At most `sampling.concurrent_requests` responses are asked for at once, in the order of the groups. After the first
    failure nothing more is asked for, and what is running is aborted.

    Args:
        tokens_used: Response tokens of this transaction that were sampled before.
        check_alive: Raises when the server cannot answer any more; called at least once a second, because rank 0 may
            wait for a rank that is gone.

    Raises:
        StageFailed, NumericError: the first failure, the time of the stage is over, or `max_total_tokens` is reached.
    """
    deadline = time.monotonic() + sampling.timeout_seconds
    budget = _Budget(None if sampling.max_total_tokens is None else sampling.max_total_tokens - tokens_used)
    total, done = sum(len(group) for group in groups), 0
    sizes = {group[0].prompt.prompt_id: len(group) for group in groups if group}
    collected: dict[str, dict[int, Rollout]] = {prompt_id: {} for prompt_id in sizes}
    waiting: Iterator[Wanted] = (wanted for group in groups for wanted in group)
    following = next(waiting, None)
    running: dict[Future[Rollout], Wanted] = {}

    def out_of_time() -> StageFailed:
        return StageFailed(
            f"sampling.timeout_seconds ({sampling.timeout_seconds:g} s) is over with {done} of {total} "
            "responses sampled; the same command continues with the groups that are missing"
        )

    pool = ThreadPoolExecutor(max_workers=sampling.concurrent_requests, thread_name_prefix="response")
    try:
        while following is not None or running:
            while following is not None and len(running) < sampling.concurrent_requests:
                if not budget.take(following.max_tokens):
                    break
                seconds = min(sampling.request_timeout_seconds, max(1.0, deadline - time.monotonic()))
                running[pool.submit(client.sample, following, timeout_seconds=seconds)] = following
                following = next(waiting, None)
            if not running:
                raise StageFailed(
                    f"sampling.max_total_tokens ({sampling.max_total_tokens}) does not suffice: {done} of {total} "
                    "responses are sampled; raise it, or lower max_response_tokens or group_size"
                )
            if check_alive is not None:
                check_alive()
            ended, _ = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in ended:
                wanted = running.pop(future)
                rollout = future.result()
                if rollout.finish_reason == "abort" and time.monotonic() >= deadline:
                    raise out_of_time()
                budget.give_back(wanted.max_tokens - len(rollout.token_ids))
                group = collected[rollout.prompt_id]
                group[rollout.index] = rollout
                done += 1
                if progress is not None:
                    progress("responses sampled", done, total)
                if len(group) == sizes[rollout.prompt_id]:
                    finished(rollout.prompt_id, [group[index] for index in sorted(group)])
            if time.monotonic() >= deadline and done < total:
                raise out_of_time()
    except BaseException:
        client.abort(None)
        # requests that a hanging server still holds end with the server, not before
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
