"""Weight codes that reproduce what a float layer gives, found from second moments.

For one output channel let `c` be the codes a layer reads (less their zero point), `q` its weight
codes, `b` its bias, and `y` what the float layer gives, in units of the channel's accumulator
(`y / (s_in * s_w)`). Its mean squared error is

    E[(y - q c - b)^2] = d H d - 2 g d + const,   d = q - w / s_w,  H = cov(c, c),
                                                  g = cov(y - (w / s_w) c, c)

once `b` takes the mean, `b = E[y] - q E[c]`. `g` is what the layers before this one make wrong and
these codes can still correct. Few samples know few directions well: `H` is given a share of its
mean diagonal (`damping`), which draws `d` to zero where nothing is known, and `g` a factor.

`settle` rounds the weights one after another, each error made up for by those that follow;
`descend` then changes single codes, each to the best for the others as they are, so that the error
never rises. The better of the two starts (nearest codes, settled codes) is kept for each channel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilewright.ptq.reconstruct_kernel import descend_rows, settle_rows

FloatArray = npt.NDArray[np.float64]


@dataclass
class Moments:
    """First and second moments of a layer's inputs and targets, for every group of channels."""

    count: int
    """Positions seen."""
    mean_x: FloatArray
    """`[group, K]`: mean of the input codes less their zero point."""
    mean_y: FloatArray
    """`[group, O]`: mean of the targets."""
    xx: FloatArray
    """`[group, K, K]`: covariance of the inputs."""
    yx: FloatArray
    """`[group, O, K]`: covariance of targets and inputs."""
    yy: FloatArray
    """`[group, O]`: variance of the targets."""

    @staticmethod
    def of(
        x: npt.NDArray[np.float32],
        y: npt.NDArray[np.float32],
        weight: npt.NDArray[np.float32] | None = None,
    ) -> Moments:
        """Return the moments of `x[group, K, N]` and `y[group, O, N]`.

        With `weight[group, N]` (0..1) they are weighted means.
        """
        if weight is None:
            weight = np.ones((x.shape[0], x.shape[2]), np.float32)
        total = np.maximum(weight.sum(axis=1, dtype=np.float64), 1e-12)
        root = np.sqrt(weight)
        # Of one array times itself transposed half is computed.
        left, right = x * root[:, None], y * root[:, None]
        turned, column = left.transpose(0, 2, 1), root[..., None]
        mean_x = (left @ column)[..., 0].astype(np.float64) / total[:, None]
        mean_y = (right @ column)[..., 0].astype(np.float64) / total[:, None]
        # Means are taken off afterwards: a code's mean is of the size of its deviation.
        scale = total[:, None, None]
        xx = (left @ turned).astype(np.float64) / scale - mean_x[:, :, None] * mean_x[:, None]
        yx = (right @ turned).astype(np.float64) / scale - mean_y[:, :, None] * mean_x[:, None]
        yy = np.einsum("gon,gon->go", right, right, dtype=np.float64) / total[:, None]
        return Moments(x.shape[2], mean_x, mean_y, xx, yx, np.maximum(yy - mean_y**2, 0))


def errors(codes: FloatArray, bias: FloatArray, moments: Moments) -> FloatArray:
    """Return the mean squared error `[group, O]` of codes `[group, O, K]` and biases `[group, O]`.

    It is exact for the positions the moments are of, up to float64's rounding.
    """
    shift = bias + np.einsum("gok,gk->go", codes, moments.mean_x) - moments.mean_y
    spread = np.einsum("gok,gok->go", codes @ moments.xx, codes)
    return spread - 2 * np.einsum("gok,gok->go", codes, moments.yx) + moments.yy + shift**2


def fit_codes(
    start: FloatArray,
    real: FloatArray,
    moments: Moments,
    *,
    limit: int,
    damping: float = 0.01,
    trust: float = 1.0,
    sweeps: int = 4,
) -> FloatArray:
    """Return codes `[group, O, K]` that lower the error of `start` on the moments' positions.

    Args:
        start: codes to begin with.
        real: the float weights in units of a code step.
        moments: of the layer's inputs (codes) and targets (in accumulator units).
        limit: codes are `-limit..limit`.
        damping: share of the mean diagonal of the second moments that is added to it.
        trust: factor of the covariance of inputs and what earlier layers made wrong.
        sweeps: how often every code is visited, at most.
    """
    size = start.shape[2]
    base = np.einsum("gkk->g", moments.xx) / max(size, 1)
    # A group that reads nothing but one value has no directions; its codes stay.
    hessian = moments.xx + damping * base[:, None, None] * np.eye(size)
    goal = trust * (moments.yx - real @ moments.xx)
    found = descend(start, real, hessian, goal, limit, sweeps)
    if size == 1:
        return found
    other = settle(real, hessian, goal, limit)
    other = descend(other, real, hessian, goal, limit, sweeps)
    better = loss(other, real, hessian, goal) < loss(found, real, hessian, goal)
    return np.where(better[..., None], other, found)


def loss(codes: FloatArray, real: FloatArray, hessian: FloatArray, goal: FloatArray) -> FloatArray:
    """Return `d H d - 2 g d` of every channel `[group, O]`, `d = codes - real`."""
    apart = codes - real
    return np.einsum("gok,gok->go", apart @ hessian - 2 * goal, apart)


def descend(
    codes: FloatArray,
    real: FloatArray,
    hessian: FloatArray,
    goal: FloatArray,
    limit: int,
    sweeps: int,
) -> FloatArray:
    """Return codes after coordinate descent on `d H d - 2 g d`; no channel's loss rises.

    Args:
        codes: `[group, O, K]`, whole numbers of magnitude at most `limit`, where it begins.
        real: the float weights in code steps.
        hessian: `H`, `[group, K, K]`, symmetric; inputs whose diagonal is zero keep their codes.
        goal: `g`, `[group, O, K]`.
        limit: codes are `-limit..limit`.
        sweeps: how often every code is visited, at most.
    """
    moved = np.array(codes, np.float64, order="C")
    slope = np.ascontiguousarray((moved - real) @ hessian - goal)
    descend_rows(moved, slope, np.ascontiguousarray(hessian), float(limit), sweeps)
    return moved


def settle(real: FloatArray, hessian: FloatArray, goal: FloatArray, limit: int) -> FloatArray:
    """Return codes rounded one after another, each error made up for by the weights that follow.

    The weights begin at the minimum over the reals, `real + goal / H`. With `U` the upper Cholesky
    factor of `1 / H`, rounding weight `k` by `e` moves the best of weight `j > k` by
    `-e * U[k, j] / U[k, k]`. Where `H` cannot be inverted codes are the nearest.
    """
    # The inputs of most energy first: what is left over goes to those that matter least.
    order = np.argsort(-np.einsum("gkk->gk", hessian), axis=1, kind="stable")
    turned = np.take_along_axis(hessian, order[:, :, None], 1)
    turned = np.take_along_axis(turned, order[:, None], 2)
    try:
        inverse = np.linalg.inv(turned)
        # Symmetric to the last bit, which inverting is not.
        inverse = (inverse + inverse.transpose(0, 2, 1)) / 2
        upper = np.linalg.cholesky(inverse).transpose(0, 2, 1)
    except np.linalg.LinAlgError:
        return np.clip(np.rint(real), -limit, limit)
    places = np.broadcast_to(order[:, None], real.shape)
    weights = np.take_along_axis(real, places, 2) + np.take_along_axis(goal, places, 2) @ inverse
    weights = np.ascontiguousarray(weights, np.float64)
    settle_rows(weights, np.ascontiguousarray(upper, np.float64), float(limit))
    codes = np.empty_like(weights)
    np.put_along_axis(codes, places, weights, 2)
    return codes


def best_bias(codes: FloatArray, moments: Moments) -> FloatArray:
    """Return the biases `[group, O]` that leave no mean error."""
    return moments.mean_y - np.einsum("gok,gk->go", codes, moments.mean_x)


__all__ = [
    "Moments",
    "best_bias",
    "descend",
    "errors",
    "fit_codes",
    "loss",
    "settle",
]
