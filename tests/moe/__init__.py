"""Tests of the MoE exchange."""
