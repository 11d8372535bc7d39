"""Who goes on: tasks that take turns and messages that arrive, in an order that a seed decides.

A task runs until it performs an operation or has to wait; then one of the tasks that can go on is chosen, or a message
makes its next step. When every task waits and nothing is in flight, the run ends at once with what each one waits for.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ops.moe_comm_gpu.emulation import tasks
from ops.moe_comm_gpu.emulation.ordering import Actor, SimulationError

#: Choices for which a rank that stalls is passed over.
_STALL_STEPS = 40


class DeadlockError(SimulationError):
    """Every task waits and nothing is in flight."""


class _Abort(BaseException):
    """Unwinds a task after another one has failed."""


@dataclass(frozen=True)
class Policy:
    """How a run is scheduled, drawn from its seed.

    Attributes:
        switch: chance that another task goes on after an operation.
        deliver: chance, at each choice, that a message makes a step although a task could go on.
        order: which message: ``"random"``, ``"oldest"`` or ``"newest"``.
        tear: chance that a put's data arrive in two parts.
        stall: chance, at each choice, that a rank stops for a while.
    """

    switch: float
    deliver: float
    order: str
    tear: float
    stall: float

    @staticmethod
    def draw(rng: random.Random) -> Policy:
        """A policy between eager and as late as possible."""
        return Policy(
            switch=rng.choice((0.05, 0.2, 0.5)),
            deliver=rng.choice((0.0, 0.05, 0.3, 0.8)),
            order=rng.choice(("random", "random", "oldest", "newest")),
            tear=rng.choice((0.0, 0.3)),
            stall=rng.choice((0.0, 0.01, 0.05)),
        )


@dataclass(eq=False)
class Task:
    """A rank's host, or a program of one of its kernels.

    Attributes:
        name: for messages.
        rank: whose it is.
        body: what it does.
        actor: as whom it accesses memory.
        index: of a program in its grid.
        grid: of a program.
        label: of a program's launch; ``"host"`` for hosts.
        call: number of a program's launch on its rank.
        host: of a program: the task that launched it and waits for it.
        baton: what its thread waits for.
        waits_for: while it waits: for what, in words.
        started: whether it has a thread.
    """

    name: str
    rank: int
    body: Callable[[], None]
    actor: Actor
    index: tuple[int, int, int] = (0, 0, 0)
    grid: tuple[int, ...] = (1, 1, 1)
    label: str = "host"
    call: int = -1
    host: Task | None = None
    baton: tasks.Baton = field(default_factory=tasks.Baton)
    waits_for: Callable[[], str] | None = None
    started: bool = False


@dataclass(eq=False)
class Message:
    """A put or a signal on its way: ``steps`` that happen in order."""

    destination_rank: int
    steps: deque[Callable[[], object]]


class Scheduler:
    """Runs tasks one at a time.

    Args:
        num_ranks: how many ranks the tasks belong to.
        rng: decides everything that is left open.
        policy: how to decide.
        enter: called with a task whenever it goes on.
        note: said about every error.
    """

    def __init__(
        self, num_ranks: int, rng: random.Random, policy: Policy, enter: Callable[[Task], None], note: str
    ) -> None:
        self.policy = policy
        self.running: Task | None = None
        self.tasks: list[Task] = []  # not finished
        self.in_flight: list[Message] = []
        self._num_ranks, self._rng, self._enter_hook, self._note = num_ranks, rng, enter, note
        self._ready: list[Task] = []
        self._waiting: dict[Any, list[Task]] = defaultdict(list)  # by what they wait for
        self._stalled, self._stalled_until, self._step = -1, 0, 0
        self._error: BaseException | None = None
        self._finished = tasks.Baton()

    def run(self) -> None:
        """Runs the tasks that were added, and those that they add, to their ends; raises the first error."""
        first = self._choose()
        if first is not None:
            self._resume(first)
            self._finished.wait()
        if self._error is not None:
            raise self._error

    def add(self, task: Task) -> None:
        """Makes a task ready to start."""
        self.tasks.append(task)
        self._ready.append(task)

    def _choose(self) -> Task | None:
        """The task that goes on; None when there is none left."""
        while True:
            if self._error is not None:
                # Programs before hosts: a host whose thread is lent can only be unwound after its borrower.
                return next((t for t in reversed(self.tasks) if t.started), None)
            self._step += 1
            if self._rng.random() < self.policy.stall:
                self._stalled, self._stalled_until = self._rng.randrange(self._num_ranks), self._step + _STALL_STEPS
            if self.in_flight and (not self._ready or self._rng.random() < self.policy.deliver):
                self._deliver()
                continue
            ready = self._ready
            if self._step < self._stalled_until:
                ready = [t for t in ready if t.rank != self._stalled] or ready
            if ready:
                return ready[self._rng.randrange(len(ready))]
            if not self.tasks:
                return None
            self._fail(self._deadlock())

    def _deliver(self) -> None:
        messages = self.in_flight
        if self._step < self._stalled_until:
            messages = [m for m in messages if m.destination_rank != self._stalled] or messages
        position = {"random": self._rng.randrange(len(messages)), "oldest": 0, "newest": -1}[self.policy.order]
        self._advance(messages[position])

    def _advance(self, message: Message) -> None:
        try:
            message.steps.popleft()()
        except SimulationError as error:
            self._fail(error)
        if not message.steps:
            self.in_flight.remove(message)

    def _deadlock(self) -> DeadlockError:
        waits = [f"  {t.name} waits for {t.waits_for()}" for t in self.tasks if t.waits_for is not None]
        hosts = {t.rank for t in self.tasks if t.label == "host"}
        waits += [f"  rank {rank} has returned" for rank in range(self._num_ranks) if rank not in hosts]
        return DeadlockError("every task waits and nothing is in flight:\n" + "\n".join(waits))

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            task = self.running.name if self.running is not None else "the network"
            error.add_note(f"{self._note}, while {task} ran")
            self._error = error

    def _resume(self, task: Task) -> None:
        if task.started:
            task.baton.give()
        else:
            task.started = True
            tasks.start(lambda: self._run_task(task))

    def _enter(self, task: Task) -> None:
        self.running = task
        self._enter_hook(task)

    def _run_task(self, task: Task) -> None:
        """The life of a thread: runs ``task``, then further ones as long as new ones are chosen."""
        while True:
            self._execute(task)
            following = self._choose()
            if following is None:
                self._finished.give()
                return
            if following.started:
                following.baton.give()
                return
            task = following
            task.started = True

    def _execute(self, task: Task) -> None:
        """Runs a task to its end."""
        self._enter(task)
        try:
            task.body()
        except _Abort:
            pass
        except BaseException as error:  # noqa: BLE001 - whatever it is, run() raises it
            self._fail(error)
        self.tasks.remove(task)
        if task in self._ready:
            self._ready.remove(task)

    def _switch(self, task: Task) -> None:
        """Lets the scheduler choose; returns when ``task`` is to go on."""
        chosen = self._choose()
        # A host that waits for its kernel lends its thread to programs of that kernel: it cannot go on before they end.
        while chosen is not None and not chosen.started and chosen.host is task:
            chosen.started = True
            self._execute(chosen)
            chosen = self._choose()
        if chosen is not task:
            assert chosen is not None
            self._resume(chosen)
            task.baton.wait()
        self._enter(task)
        if self._error is not None:
            raise _Abort

    def operate(self, task: Task) -> None:
        """A place where another task may go on."""
        if self._error is not None:
            raise _Abort
        if self._rng.random() < self.policy.switch:
            self._switch(task)

    def block(self, task: Task, key: Any, done: Callable[[], bool], waits_for: Callable[[], str]) -> None:
        """Returns once ``done()``; looked at again whenever ``wake(key)`` is called."""
        while not done():
            task.waits_for = waits_for
            self._ready.remove(task)
            self._waiting[key].append(task)
            self._switch(task)
        task.waits_for = None

    def wake(self, key: Any) -> None:
        """Makes the tasks that wait for ``key`` look again."""
        self._ready.extend(self._waiting.pop(key, ()))

    def flush(self) -> None:
        """Lets everything arrive, in the policy's order."""
        while self.in_flight and self._error is None:
            self._deliver()
