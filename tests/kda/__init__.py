"""Tests of the KDA operator."""
