"""Makes the tasks of a rank in the order of their microbatches, for schedules of one's own."""

from collections import Counter

from ...mpmd.api import FusedTask, Task, TaskType


class SequentialMicrobatchesIterator:
    """Makes tasks, each of the microbatch after the last one of its stage and operation.

    Example:
        >>> it = SequentialMicrobatchesIterator()
        >>> print(it.fwd(0), it.fwd(0), it.bwd(0), it.fwd_bwd(0, 0))
        fwd_0__0 fwd_0__1 bwd_0__0 FusedTask(fwd_0__2, bwd_0__1)
    """

    def __init__(self) -> None:
        self.task_mubatch: Counter[tuple[int, TaskType]] = Counter()

    def task(self, stage_id: int, task_type: TaskType) -> Task:
        """Returns the next task of an operation of a stage."""
        key = stage_id, task_type
        task = Task.make(stage_id, self.task_mubatch[key], task_type)
        self.task_mubatch[key] += 1
        return task

    def fwd(self, stage_id: int) -> Task:
        """Returns the next forward of a stage."""
        return self.task(stage_id, TaskType.FWD)

    def bwd(self, stage_id: int) -> Task | FusedTask:
        """Returns the next backward of a stage."""
        return self.task(stage_id, TaskType.BWD)

    def fwd_bwd(self, fwd_stage_id: int, bwd_stage_id: int) -> FusedTask:
        """Returns the next forward of a stage fused with the next backward of a stage."""
        forward, backward = self.fwd(fwd_stage_id), self.bwd(bwd_stage_id)
        return FusedTask((forward, *(backward if isinstance(backward, FusedTask) else (backward,))))


class ZBSequentialMicrobatchesIterator(SequentialMicrobatchesIterator):
    """Makes tasks as its base class does, with backwards in two halves.

    Example:
        >>> it = ZBSequentialMicrobatchesIterator()
        >>> print(it.fwd(1), it.bwd_a(1), it.bwd_w(1), it.bwd(1))
        fwd_1__0 bwd_i_1__0 bwd_w_1__0 FusedTask(bwd_i_1__1, bwd_w_1__1)
    """

    def bwd_a(self, stage_id: int) -> Task:
        """Returns the next half of a backward for the inputs of a stage."""
        return self.task(stage_id, TaskType.BWD_I)

    def bwd_w(self, stage_id: int) -> Task:
        """Returns the next half of a backward for the weights of a stage."""
        return self.task(stage_id, TaskType.BWD_W)

    def bwd(self, stage_id: int) -> FusedTask:
        """Returns both halves of the next backward of a stage."""
        return FusedTask((self.bwd_a(stage_id), self.bwd_w(stage_id)))
