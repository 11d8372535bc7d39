"""Accelerator operators. Start from :mod:`ops.registry`; importing this package loads no framework."""
