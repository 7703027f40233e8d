"""Index arithmetic that folds: linear expressions over loop variables with known ranges.

An expression becomes an `affine.apply` or `affine.min` only where it is not constant, so that full
tiles have static shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from xdsl.ir import SSAValue
from xdsl.ir.affine import AffineExpr


@dataclass(frozen=True, eq=False)
class Variable:
    """An index value (loop variable or result of an `affine.min`) between `low` and `high`."""

    value: SSAValue
    low: int
    high: int


@dataclass(frozen=True)
class Index:
    """`constant + sum(factor * variable)`."""

    constant: int = 0
    terms: tuple[tuple[Variable, int], ...] = field(default=())

    @staticmethod
    def of(value: Index | int) -> Index:
        """Return `value` as an expression."""
        return value if isinstance(value, Index) else Index(value)

    @property
    def low(self) -> int:
        """Smallest value (exact if no variable depends on another)."""
        return self.constant + sum(
            factor * (variable.low if factor > 0 else variable.high)
            for variable, factor in self.terms
        )

    @property
    def high(self) -> int:
        """Largest value."""
        return self.constant + sum(
            factor * (variable.high if factor > 0 else variable.low)
            for variable, factor in self.terms
        )

    def __add__(self, other: Index | int) -> Index:
        other = Index.of(other)
        factors = dict(self.terms)
        for variable, factor in other.terms:
            factors[variable] = factors.get(variable, 0) + factor
        terms = tuple((variable, factor) for variable, factor in factors.items() if factor)
        return Index(self.constant + other.constant, terms)

    def __mul__(self, factor: int) -> Index:
        if factor == 0:
            return Index(0)
        terms = tuple((variable, own * factor) for variable, own in self.terms)
        return Index(self.constant * factor, terms)

    def __neg__(self) -> Index:
        return self * -1

    def __sub__(self, other: Index | int) -> Index:
        return self + -Index.of(other)

    def expression(self, variables: list[Variable]) -> AffineExpr:
        """Return the affine expression over dimensions in the order of `variables`."""
        result: AffineExpr | None = None
        for variable, factor in self.terms:
            dimension: AffineExpr = AffineExpr.dimension(variables.index(variable))
            term = dimension if factor == 1 else dimension * factor
            result = term if result is None else result + term
        if result is None:
            return AffineExpr.constant(self.constant)
        return result + self.constant if self.constant else result
