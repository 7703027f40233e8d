# pyright: basic
"""How loops of quantisation are compiled by numba."""

from __future__ import annotations

from numba import njit


def compiled(**options):
    """Return a decorator that compiles, keeping the result for later runs where possible."""

    def decorate(function):
        try:
            return njit(cache=True, nogil=True, error_model="numpy", **options)(function)
        except RuntimeError:
            # Neither beside this file nor in the user's folder can anything be written.
            return njit(nogil=True, error_model="numpy", **options)(function)

    return decorate
