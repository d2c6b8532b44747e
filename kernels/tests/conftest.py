"""Marks of the suite: gpu tests skip by themselves where there is no GPU."""

from cake.core.testing.markers import pytest_configure, pytest_runtest_setup

__all__ = ["pytest_configure", "pytest_runtest_setup"]
