"""Judging TPU kernels without a TPU, from the schedule that libtpu's ahead-of-time compiler makes.

Data flows through the modules in this order:

    chips     the machines: clock, bandwidth, unit sizes; tracing as if on one of them
    traffic   from the traced program: its Pallas kernels, their blocks and what these move through HBM
    compiler  the program, lowered to StableHLO, is compiled by libtpu in a worker process
    hlo       from the compiled program: where the kernels are, what the XLA operations around them move
    schedule  from the compiler's dumps: loops, cycles, unit use, spills, VMEM of each kernel
    profile   puts these together: ``profile(function, arguments, chip) -> Report``
    report    the report as a table and as JSON records

Every figure is the compiler's schedule or an estimate from byte counts. Nothing here is a measurement.
"""
