"""Tests marked gpu or nvcc are skipped where there is none."""

from cake.core.testing.markers import pytest_configure, pytest_runtest_setup

__all__ = ["pytest_configure", "pytest_runtest_setup"]
