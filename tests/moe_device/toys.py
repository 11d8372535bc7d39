"""Small kernels with one communication pattern each, and the hosts that run them."""

import torch
import triton
import triton.language as tl

from ops.moe_comm_gpu.device import primitives as dev

BLOCK = 32
OPERATIONS = ("receive", "acknowledge")


@triton.jit
def send(source, inbox, arrived, round_number, BLOCK: tl.constexpr, direct: tl.constexpr):
    """Program p fills its part of the source and sends it to rank p."""
    me, pe = dev.my_pe(), tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    values = me * 1000 + pe * 100 + round_number * 10000 + lane
    if direct:
        tl.store(dev.peer_ptr(inbox, pe) + me * BLOCK + lane, values)
        dev.signal_peer(dev.peer_ptr(arrived + me, pe), 1, dev.SIGNAL_ADD)
    else:
        tl.store(source + pe * BLOCK + lane, values)
        dev.put_signal_nbi(inbox + me * BLOCK, source + pe * BLOCK, BLOCK * 4, arrived + me, 1, dev.SIGNAL_ADD, pe)


@triton.jit
def receive(inbox, arrived, acknowledged, out, round_number, watchdog, BLOCK: tl.constexpr):
    """Program p waits for what rank p sent, copies it, and acknowledges."""
    me, pe = dev.my_pe(), tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    dev.wait_ge(arrived + pe, round_number, watchdog, 0, pe)
    tl.store(out + pe * BLOCK + lane, tl.load(inbox + pe * BLOCK + lane))
    dev.signal(acknowledged + me, 1, dev.SIGNAL_ADD, pe)


@triton.jit
def await_acknowledgements(acknowledged, round_number, watchdog):
    """Waits until everybody has read what this rank sent."""
    for pe in range(dev.n_pes()):
        dev.wait_ge(acknowledged + pe, round_number, watchdog, 1, pe)


def exchange(runtime, rounds=3, direct=False, acknowledge=True):
    """All ranks send to all, ``rounds`` times through the same memory; returns what arrived, by round."""
    ranks = runtime.n_pes
    source = runtime.allocate(ranks * BLOCK * 4, "source", zeroed=False).view(torch.int32)
    inbox = runtime.allocate(ranks * BLOCK * 4, "inbox", zeroed=False).view(torch.int32)
    arrived = runtime.allocate(ranks * 8, "arrived").view(torch.int64)
    acknowledged = runtime.allocate(ranks * 8, "acknowledged").view(torch.int64)
    runtime.set_operations(OPERATIONS)
    received = []
    for number in range(1, rounds + 1):
        out = torch.full((ranks, BLOCK), -1, dtype=torch.int32)
        runtime.launch(send, (ranks,), source, inbox, arrived, number, BLOCK=BLOCK, direct=direct)
        runtime.launch(receive, (ranks,), inbox, arrived, acknowledged, out, number, runtime.watchdog, BLOCK=BLOCK)
        if acknowledge:
            runtime.launch(await_acknowledgements, (1,), acknowledged, number, runtime.watchdog)
        received.append(out)
    runtime.barrier()
    for tensor in (source, inbox, arrived, acknowledged):
        runtime.free(tensor)
    return torch.stack(received)


def expected(rank, ranks, rounds=3):
    """What :func:`exchange` returns on ``rank``."""
    number = torch.arange(1, rounds + 1, dtype=torch.int32)[:, None, None] * 10000
    sender = torch.arange(ranks, dtype=torch.int32)[None, :, None] * 1000
    return number + sender + rank * 100 + torch.arange(BLOCK, dtype=torch.int32)


def check(results, rounds=3):
    """Compares every word that every rank received in every round."""
    for rank, received in enumerate(results):
        torch.testing.assert_close(received, expected(rank, len(results), rounds), rtol=0, atol=0)
