"""Where the device primitives go when a kernel runs under Triton's interpreter instead of on a GPU.

The simulator and the multi-process emulation each implement :class:`DeviceHooks` and make themselves current while a
program of theirs runs. Only standard-library types cross this line: addresses, counts and ranks are Python integers.
"""

from __future__ import annotations

from typing import Protocol


class DeviceHooks(Protocol):
    """The communication operations of one program, on integers; the primitives document what each one means."""

    def my_pe(self) -> int:
        """Number of the rank that runs the program."""

    def n_pes(self) -> int:
        """Number of ranks."""

    def peer_address(self, address: int, pe: int) -> int:
        """Where the symmetric ``address`` lies on rank ``pe``; 0 when out of reach of loads and stores."""

    def put_signal(
        self, destination: int, source: int, num_bytes: int, signal: int, value: int, op: int, pe: int
    ) -> None:
        """A put that changes ``signal`` after its data."""

    def signal(self, signal: int, value: int, op: int, pe: int) -> None:
        """Changes ``signal`` on rank ``pe``."""

    def wait_ge(
        self,
        signal: int,
        target: int,
        timeout_ns: int,
        operation: int,
        awaited: int,
        flags: tuple[int, int, int] | None,
    ) -> int:
        """Returns the value of ``signal`` once it is at least ``target``.

        ``flags`` (address, target, number of ranks) are those of the ranks that may be awaited, to name the first whose
        flag is lower; None to name ``awaited``.
        """


_current: DeviceHooks | None = None


def set_current(hooks: DeviceHooks | None) -> None:
    """Makes ``hooks`` the ones that the next primitive calls; None when no program runs."""
    global _current
    _current = hooks


def current() -> DeviceHooks:
    """The hooks of the program that runs now.

    Raises:
        RuntimeError: a primitive was called outside a kernel that a runtime launched.
    """
    if _current is None:
        raise RuntimeError(
            "device primitive called outside an emulated kernel; expected a kernel launched through a runtime "
            "(Runtime.launch) or compiled for a GPU; got a direct call"
        )
    return _current
